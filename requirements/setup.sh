#!/usr/bin/env bash
# Makes .venv with the pinned engines and the three packages of this tree; does nothing when that is already done.
set -euo pipefail
cd "$(dirname "$0")/.."

lock=requirements/cpu-0.5.17.lock
uv_version=0.13.9
stamp=.venv/set-up-for
key=$(cat "$lock" requirements/setup.sh ./*/pyproject.toml | sha256sum | cut -d' ' -f1)

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then
  exit 0
fi

# pyenv puts a python3.12 on PATH that fails unless a 3.12 is selected, so each candidate is run, not only looked up.
find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.12 python3 "$HOME"/.pyenv/versions/3.12.*/bin/python; do
    if [ -n "$candidate" ] && "$candidate" -c \
      'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "set-up: no Python 3.12 with venv found; get one with 'sudo apt install python3.12 python3.12-venv', 'uv python install 3.12' or 'pyenv install 3.12', or name it: make PYTHON=/path/to/python3.12 ..." >&2
  return 1
}

if [ -f "$stamp" ]; then
  echo "set-up: the lock or a package changed; bringing .venv up to date"
  rm "$stamp"
else
  python=$(find_python)
  if [ -e .venv ]; then
    echo "set-up: .venv was left half done; making it anew"
    rm -rf .venv
  fi
  echo "set-up: installing SGLang, Megatron-core and torch into .venv with $("$python" --version): about 9 GB, 2 minutes on a fast line"
  "$python" -m venv .venv
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check "uv==$uv_version"

# uv reads UV_* settings; a person who configured only pip's index means the same index.
if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] && index=$(.venv/bin/python -m pip config get global.index-url 2>/dev/null); then
  export UV_DEFAULT_INDEX="$index"
fi
# Compiled once here: where PYTHONDONTWRITEBYTECODE is set, every process would compile 9 GB of packages anew, a minute each.
.venv/bin/uv pip install --python .venv/bin/python --require-hashes --compile-bytecode -r "$lock"
# Without isolation, so that the locked setuptools builds them and nothing else is fetched.
.venv/bin/uv pip install --python .venv/bin/python --no-deps --no-build-isolation \
  -e sglang_plugin -e megatron_plugin -e miles_launcher
echo "$key" >"$stamp"
echo "set-up: done"
