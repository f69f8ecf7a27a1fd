#!/bin/sh
# Builds .venv from requirements.lock and installs vlatune into it, editable. What `make setup` runs.
#
# Safe to run at any time: a stamp inside .venv says what it was built from, and when nothing has changed this
# takes a few hundredths of a second. A build that was interrupted leaves a mark and is started anew.
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

# Everything that decides the content of .venv; its first line is the folder.
fingerprint() {
    pwd -P
    { "$python" --version && cat requirements.lock pyproject.toml scripts/setup.sh; } 2>/dev/null | cksum
}

runs() { "$python" -I -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
moved() { [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" != "$(pwd -P)" ]; } # the scripts in bin/ name their folder
sound() { [ ! -e "$building" ] && runs && ! moved; }
built() { [ -f "$stamp" ] && sound && [ "$(cat "$stamp")" = "$(fingerprint)" ]; }

built && exit 0
if command -v flock >/dev/null 2>&1; then # two set-ups at once: the second waits, then finds the work done
    exec 9<requirements.lock
    flock 9
    built && exit 0
fi

base=$(sh scripts/find_python.sh || true)
uv=$(sh scripts/find_uv.sh "${base:-$(sh scripts/find_python.sh --any || true)}") || exit 1
if [ -t 2 ]; then quiet=''; else quiet=--quiet; fi # on a terminal uv shows its progress bars

if ! sound; then
    if [ -z "$base" ]; then
        say "no Python 3.12 or 3.13 here; letting uv fetch one"
        "$uv" python install 3.12 || fail "uv could not fetch Python 3.12 (see above); install one, e.g. apt-get install python3.12, or connect to a network, and run it again"
        base=3.12
    fi
    say "making .venv with Python $base"
    rm -rf .venv
    "$uv" venv --quiet --python "$base" .venv || fail "could not make .venv with Python $base (see above)"
fi

: >"$building"
rm -f "$stamp"
say "installing $(grep -c '^[a-z0-9].*==' requirements.lock) pinned packages into .venv and compiling them (the first time: about 3 GB to download, then a minute)"
# Compiled now: where python may not write bytecode (PYTHONDONTWRITEBYTECODE, usual in containers), every process of
# every run would compile torch and LeRobot anew, 28 s instead of 10 on two slow cores.
"$uv" pip sync $quiet --compile-bytecode --python "$python" --require-hashes --only-binary :all: requirements.lock ||
    fail "could not install the packages (see above); it needs a network or a package mirror, and 8 GB of disk; run it again to go on"
"$uv" pip install $quiet --python "$python" --no-deps --no-build-isolation --editable . ||
    fail "could not install vlatune itself into .venv (see above)"
fingerprint >"$stamp"
rm -f "$building"
say "set up; .venv/bin/vlatune --help shows what there is"
