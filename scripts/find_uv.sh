#!/bin/sh
# Prints the path of a working uv; installs one into .uv/ if there is none.
#
# pip's --target changes nothing outside the repository and also works with an "externally managed" Python
# (PEP 668). A Python without pip gets a venv in .uv/ instead.
# $1: a Python to install uv with, or empty.
set -u
python=$1

say() { printf 'vlatune: %s\n' "$*" >&2; }
works() { "$1" python find --help >/dev/null 2>&1; } # old versions have no `uv python`

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
for interpreter in "$python" python3; do # uv installed as a Python package
    [ -n "$interpreter" ] && try "$("$interpreter" -c 'import uv; print(uv.find_uv_bin())' 2>/dev/null)"
done

if [ -z "$python" ]; then
    say "error: found neither Python nor uv; install one (apt-get install python3 python3-pip), then repeat the command"
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
    say "error: $python has neither pip nor ensurepip; install one (apt-get install python3-pip python3-venv), then repeat the command"
    exit 1
fi
try .uv/bin/uv
say "error: pip could not install uv (see above); check the network or package mirror, then repeat the command"
exit 1
