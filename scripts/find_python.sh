#!/bin/sh
# Prints the path of a Python that can run vlatune (CPython 3.12 or 3.13), or nothing and exit code 1.
#
# Every candidate is run to check its version, because a pyenv shim named python3.12 fails unless that version is
# selected. All folders of PATH are searched, as a failing shim may precede a working interpreter, then pyenv's
# versions folder. With --any, prints the first Python >= 3.8, which is enough to run pip.
set -u

if [ "${1:-}" = --any ]; then
    wanted='(3, 8) <= sys.version_info[:2]'
    names='python3 python3.13 python3.12 python3.11 python3.10 python'
else
    # No 3.14 and no free-threaded build: some pinned packages have no wheels for them.
    wanted='(3, 12) <= sys.version_info[:2] <= (3, 13) and sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")'
    names='python3.12 python3.13 python3 python'
fi

# try FILE: if FILE runs and has a wanted version, print the path of its interpreter and exit.
try() {
    [ -x "$1" ] || return 0
    found=$("$1" -I -c "import sys, sysconfig; print(sys.executable if $wanted else '')" 2>/dev/null </dev/null) || return 0
    [ -n "$found" ] || return 0
    printf '%s\n' "$found"
    exit 0
}

for name in $names; do
    rest=$PATH:
    while [ -n "$rest" ]; do
        folder=${rest%%:*}
        rest=${rest#*:}
        try "${folder:-.}/$name"
    done
done
for python in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[0-9]*/bin/python; do
    try "$python"
done
exit 1
