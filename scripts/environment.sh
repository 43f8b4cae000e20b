# Shared by the scripts beside it, and sourced by them: where Python is, and the `.venv` of this clone.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# fail MESSAGE...: one paragraph to stderr, and out.
fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# python_version PYTHON: prints "3.11"; nothing where PYTHON can't be run (a shim of pyenv without a version behind it).
python_version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

is_supported() {
    case $1 in 3.10 | 3.11 | 3.12) return 0 ;; *) return 1 ;; esac
}

# find_python: prints the first Python 3.10-3.12 of $PYTHON, or of those on PATH.
find_python() {
    local candidate version seen="" candidates=${PYTHON:-python3 python3.12 python3.11 python3.10 python}
    for candidate in $candidates; do
        version=$(python_version "$candidate")
        if is_supported "$version"; then
            command -v "$candidate"
            return
        fi
        [ -z "$version" ] || seen="$seen $candidate is $version;"
    done
    fail "needs Python 3.10, 3.11 or 3.12 (MindSpore 2.10 has wheels for these), and found none:" \
        "${seen:- no Python at all;} install one, or name it: PYTHON=/path/to/python3.11 bash $0"
}

# launch_python: prints the Python to start ranks with: that of `.venv` if it exists, else the first on PATH.
launch_python() {
    local python
    if [ -x "$ROOT/.venv/bin/python" ]; then
        python=$ROOT/.venv/bin/python
    else
        python=$(find_python) || exit 1
    fi
    "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("mindspore"))' >/dev/null ||
        fail "$python has no MindSpore: run 'bash scripts/quickstart.sh' once, or 'pip install .' in your own environment"
    printf '%s\n' "$python"
}

# split_command COMMAND: fills the array COMMAND_WORDS with its words, quotes honoured, nothing else evaluated;
# a leading "python" is dropped, since the launcher names the interpreter.
split_command() {
    local words
    words=$(xargs -n1 printf '%s\n' <<<"$1" 2>/dev/null) || fail "the command has a quote that isn't closed: $1"
    mapfile -t COMMAND_WORDS <<<"$words"
    case ${COMMAND_WORDS[0]} in python | python3) COMMAND_WORDS=("${COMMAND_WORDS[@]:1}") ;; esac
    [ -n "${COMMAND_WORDS[0]:-}" ] || fail "the command is empty: give a script with its arguments, or '-m module …'"
}

# prepare_environment: makes `.venv` and installs this package with its tools, unless that is done already.
prepare_environment() {
    local venv=$ROOT/.venv python version stamp wanted
    if [ -e "$venv/bin/python" ] && version=$(python_version "$venv/bin/python") && [ -n "$version" ]; then
        is_supported "$version" ||
            fail "$venv has Python $version, and MindSpore 2.10 needs 3.10, 3.11 or 3.12: remove $venv and run this again"
    else
        python=$(find_python) || exit 1
        make_venv "$python" "$venv"
    fi
    stamp=$venv/installed.stamp
    wanted=$(cat "$ROOT/setup.py" "$ROOT/pyproject.toml" | cksum)
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return
    install_package "$venv"
    printf '%s\n' "$wanted" >"$stamp"
}

# make_venv PYTHON FOLDER
make_venv() {
    local output
    echo "Making $2 with Python $(python_version "$1") ($1)"
    output=$("$1" -m venv --clear "$2" 2>&1) && return
    rm -rf "$2"
    case $output in
    *ensurepip* | *"No module named venv"*)
        fail "$1 comes without the venv module: install it (Debian, Ubuntu: apt install python$(python_version "$1")-venv)," \
            "or name another Python: PYTHON=/path/to/python3.11 bash $0" ;;
    *) fail "$1 -m venv $2 failed: $output" ;;
    esac
}

# install_package VENV: pip's own output goes to VENV/pip.log. Python compiles what is imported, a third of all files.
install_package() {
    local log=$1/pip.log
    echo "Installing mindformers_core into $1 (the first time MindSpore is downloaded: about 1.2 GB)"
    "$1/bin/python" -m pip install --no-compile --editable "$ROOT[test,plot,dev]" >"$log" 2>&1 </dev/null && return
    tail -n 15 "$log" >&2
    fail "$(explain_pip_failure "$log") The whole output of pip: $log"
}

# explain_pip_failure LOG: the first cause that fits; a machine without network also reports "no matching distribution".
explain_pip_failure() {
    if grep -qE "No space left|Errno 28" "$1"; then
        echo "the disk is full: MindSpore takes 2.8 GB installed, and as much again while pip unpacks it."
    elif grep -qE "NewConnectionError|name resolution|Network is unreachable|ConnectTimeout|ProxyError|Read timed out|SSLError" "$1"; then
        echo "pip can't reach the package index: check the network, a proxy (https_proxy) or a mirror (PIP_INDEX_URL)."
    elif grep -qE "No matching distribution found for mindspore|from versions: none" "$1"; then
        echo "there is no wheel of MindSpore 2.10 for $(uname -sm): it has them for Linux (x86_64, aarch64), macOS and Windows, Python 3.10-3.12."
    elif grep -qE "Failed building wheel|Failed to build|command '.*(gcc|cc|clang)' failed|error: command" "$1"; then
        echo "pip tried to compile a package, which means that it found no wheel for $(uname -sm)."
    else
        echo "pip could not install mindformers_core."
    fi
}
