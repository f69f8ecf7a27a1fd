#!/bin/sh
# Builds .venv from requirements.lock and installs vlatune into it, editable (`make setup`).
#
# A stamp in .venv records what it was built from; if nothing has changed, the script returns at once. An
# interrupted build leaves a marker file, so that the next call rebuilds .venv.
set -eu
cd "$(dirname "$0")/.."
stamp=.venv/.vlatune-stamp
building=.venv/.vlatune-building
python=.venv/bin/python

say() { printf 'vlatune: %s\n' "$*" >&2; }
fail() {
    say "error: $*"
    exit 1
}

# Prints the folder, then a checksum of everything that determines the content of .venv.
fingerprint() {
    pwd -P
    { "$python" --version && cat requirements.lock pyproject.toml scripts/setup.sh; } 2>/dev/null | cksum
}

runs() { "$python" -I -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
moved() { [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" != "$(pwd -P)" ]; } # scripts in bin/ contain the path of .venv
sound() { [ ! -e "$building" ] && runs && ! moved; }
built() { [ -f "$stamp" ] && sound && [ "$(cat "$stamp")" = "$(fingerprint)" ]; }

built && exit 0
if command -v flock >/dev/null 2>&1; then # a concurrent call waits, then finds .venv up to date
    exec 9<requirements.lock
    flock 9
    built && exit 0
fi

base=$(sh scripts/find_python.sh || true)
uv=$(sh scripts/find_uv.sh "${base:-$(sh scripts/find_python.sh --any || true)}") || exit 1
if [ -t 2 ]; then quiet=''; else quiet=--quiet; fi # uv shows progress bars on a terminal

if ! sound; then
    if [ -z "$base" ]; then
        say "no Python 3.12 or 3.13 found; downloading one with uv"
        "$uv" python install 3.12 || fail "uv could not download Python 3.12 (see above); check the network, or install it (apt-get install python3.12), then repeat the command"
        base=3.12
    fi
    say "creating .venv with Python $base"
    rm -rf .venv
    "$uv" venv --quiet --python "$base" .venv || fail "could not create .venv with Python $base (see above)"
fi

: >"$building"
rm -f "$stamp"
say "installing $(grep -c '^[a-z0-9].*==' requirements.lock) pinned packages into .venv (downloads about 3 GB unless cached)"
# Compile to bytecode now: with PYTHONDONTWRITEBYTECODE, which is usual in containers, every process would compile
# torch and LeRobot when it imports them.
"$uv" pip sync $quiet --compile-bytecode --python "$python" --require-hashes --only-binary :all: requirements.lock ||
    fail "could not install the packages (see above); check the network or package mirror and that 8 GB of disk are free, then repeat the command"
"$uv" pip install $quiet --python "$python" --no-deps --no-build-isolation --editable . ||
    fail "could not install vlatune into .venv (see above)"
fingerprint >"$stamp"
rm -f "$building"
say "done; .venv/bin/vlatune --help lists the commands"
