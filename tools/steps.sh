# Shared by the scripts beside it, which source it: the source tree's folders, and steps with their times.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
default_torch=2.15.0

# env_folder 2.11.0 -> the environment's folder: .venv for the default PyTorch, else .venv-<version>.
env_folder() {
  if [ "$1" = "$default_torch" ]; then echo "$root/.venv"; else echo "$root/.venv-$1"; fi
}

# build_folder <python> <torch version> -> where that Python builds against that PyTorch.
build_folder() {
  echo "$root/$("$1" -c 'import sys; sys.path.insert(0, sys.argv[1]); import torch_info
print(torch_info.build_folder(sys.argv[2]))' "$root/tools/cmake" "$2")"
}

# Sets base_python to a Python that environments can be made of.
find_base_python() {
  for base_python in python3 python3.13 python3.12 python3.11; do
    if "$base_python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then return; fi
  done
  echo "tools/${0##*/}: Python 3.11 or newer is needed, and none was found as python3 or python3.1x." >&2
  exit 1
}

# torch_version_argument <value> -> the value, or an error where it is no X.Y.Z.
torch_version_argument() {
  if [[ ! "${1:-}" =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]]; then
    echo "--torch takes a full version such as $default_torch, not '${1:-}'." >&2
    return 2
  fi
  echo "$1"
}

# Sources of the package.
package_sources=(csrc python tools/cmake setup.py CMakeLists.txt pyproject.toml)

# hash_of <file or folder>... -> one hash of the sources there, called in the source tree's root.
hash_of() {
  find "$@" \( -name __pycache__ -o -name '*.egg-info' \) -prune -o \
    -type f ! -name '*.so' ! -name _build_info.py -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum
}

# How many cores there are: OMP_NUM_THREADS, which nproc heeds, is about PyTorch's threads.
num_cores() { env -u OMP_NUM_THREADS nproc; }

say() { printf '[%s] %s\n' "${0##*/}" "$*"; }

# step <name> <command>...: runs it in sight, with a line before and after; returns its status.
step() {
  local name="$1" begin=$SECONDS status=0
  shift
  say "$name ..."
  "$@" || status=$?
  if [ "$status" -eq 0 ]; then say "$name: done in $((SECONDS - begin)) s"
  else say "$name: FAILED after $((SECONDS - begin)) s"; fi
  return "$status"
}
