#!/bin/sh
# Prints the path of a uv that runs; where there is none, installs one into .uv/ first.
#
# pip's --target touches nothing outside the repository, and is allowed where the system's Python is "externally
# managed" (PEP 668). A Python without pip gets a private venv instead.
# $1: a Python to install uv with, or empty.
set -u
python=$1

say() { printf 'vlatune: %s\n' "$*" >&2; }
works() { "$1" python find --help >/dev/null 2>&1; } # a uv too old to know `uv python` does not count

try() {
    if [ -n "$1" ] && works "$1"; then
        printf '%s\n' "$1"
        exit 0
    fi
}

try "$(command -v uv 2>/dev/null)"
for uv in .uv/bin/uv "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do
    [ -x "$uv" ] && try "$uv"
done
for interpreter in "$python" python3; do # uv as a package of a Python: what `python -m uv` runs
    [ -n "$interpreter" ] && try "$("$interpreter" -c 'import uv; print(uv.find_uv_bin())' 2>/dev/null)"
done

if [ -z "$python" ]; then
    say "error: found neither Python nor uv; install one of them, e.g. apt-get install python3 python3-pip, and run it again"
    exit 1
fi
say "installing uv into .uv/"
rm -rf .uv
if "$python" -m pip --version >/dev/null 2>&1; then
    PIP_USER=0 PIP_ROOT_USER_ACTION=ignore "$python" -m pip install --quiet --disable-pip-version-check --target .uv uv >&2
elif "$python" -m venv .uv >/dev/null 2>&1; then
    .uv/bin/python -m pip install --quiet --disable-pip-version-check uv >&2
else
    rm -rf .uv
    say "error: $python has neither pip nor ensurepip; install one of them, e.g. apt-get install python3-pip python3-venv, and run it again"
    exit 1
fi
try .uv/bin/uv
say "error: pip could not install uv (see above); it needs a network or a package mirror; run it again when there is one"
exit 1
