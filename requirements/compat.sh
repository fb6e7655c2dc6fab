#!/usr/bin/env bash
# Runs the parity tests at an end of the supported version ranges, in an environment of its own: compat.sh new|old
set -euo pipefail
cd "$(dirname "$0")/.."

end=${1:-}
if [ "$end" != new ] && [ "$end" != old ]; then
  echo "compat: which end? requirements/compat.sh new|old" >&2
  exit 2
fi
environment=.venv-compat-$end
lock=requirements/compat-$end.lock
stamp=$environment/set-up-for
key=$(cat "$lock" requirements/compat.sh ./*/pyproject.toml | sha256sum | cut -d' ' -f1)

# uv reads UV_* settings; a person who configured only pip's index means the same index.
if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] && index=$(.venv/bin/python -m pip config get global.index-url 2>/dev/null); then
  export UV_DEFAULT_INDEX="$index"
fi
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$key" ]; then
  echo "compat: installing the engines of $lock into $environment: about 9 GB"
  .venv/bin/uv venv --quiet --clear --python .venv/bin/python "$environment"
  # Compiled once here: where PYTHONDONTWRITEBYTECODE is set, every process would compile 9 GB of packages anew.
  .venv/bin/uv pip install --quiet --python "$environment/bin/python" --require-hashes --compile-bytecode -r "$lock"
  .venv/bin/uv pip install --quiet --python "$environment/bin/python" --no-deps --no-build-isolation \
    -e sglang_plugin -e megatron_plugin -e miles_launcher
  echo "$key" >"$stamp"
fi

# Which tests: both engines against each other, each engine against itself, and every option of the installed classes.
tests=${COMPAT_TESTS:-tests/contract/test_options.py tests/contract/test_versions.py tests/contract/test_rendered.py \
  tests/megatron/test_layout_parity.py tests/megatron/test_gradients.py tests/megatron/test_steps.py \
  tests/megatron/test_weights.py tests/megatron/test_hosts.py tests/megatron/test_receipts.py \
  tests/sglang/test_flag.py tests/sglang/test_hooks.py tests/sglang/test_engine.py tests/sglang/test_updates.py \
  tests/sglang/test_layouts.py tests/parity/test_matrix.py tests/parity/test_rounds.py}
export PATH="$PWD/$environment/bin:$PATH" OMP_NUM_THREADS=1
mkdir -p build
miles-top verify --model tiny --matrix "${COMPAT_MATRIX:-small}" --json "build/verify-$end.json"
# shellcheck disable=SC2086  (a list of files)
exec python -m pytest --timeout=900 -q $tests
