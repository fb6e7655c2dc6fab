#!/usr/bin/env bash
# Makes .venv-miles: .venv with Miles on top, Miles' forks of the engines laid aside; does nothing when that is done.
set -euo pipefail
cd "$(dirname "$0")/.."

lock=requirements/miles.lock
stamp=.venv-miles/set-up-for
key=$(cat "$lock" requirements/miles.sh .venv/set-up-for | sha256sum | cut -d' ' -f1)

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then
  exit 0
fi
echo "set-up: putting Miles beside the engines of .venv into .venv-miles: about 120 MB to fetch"
rm -rf .venv-miles
.venv/bin/python -m venv --without-pip .venv-miles
site=$(.venv-miles/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
base=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Also reads the .pth files there, through which .venv finds the three packages of this tree.
echo "import site; site.addsitedir('$base')" >"$site/_base.pth"
if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] && index=$(.venv/bin/python -m pip config get global.index-url 2>/dev/null); then
  export UV_DEFAULT_INDEX="$index"
fi
.venv/bin/uv pip install --python .venv-miles/bin/python --no-deps --require-hashes -r "$lock"
# They would stand before the stock ones. A test of Miles' parser alone looks at them.
mkdir .venv-miles/forks
mv "$site/sglang" "$site/megatron" .venv-miles/forks/
echo "$key" >"$stamp"
echo "set-up: Miles done"
