#!/bin/sh
# Installs the wheel of WORK/dist into a bare environment and runs the README's Python from there: try-wheel.sh PYTHON WORK
# Its requirements, and theirs, are links to what PYTHON has, since torch alone is gigabytes; nothing else is visible.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
python=$1
work=$(cd "$2" && pwd)
unset PYTHONPATH

"$python" -m zipfile -l "$work"/dist/*.whl | grep -q 'metapretrain/py.typed'
"$python" -m venv --without-pip "$work/bare"
"$python" -m pip --python "$work/bare" install -qq --no-deps --no-index "$work"/dist/*.whl
"$python" "$here/link_requirements.py" "$work"/bare/lib/python*/site-packages
"$python" -m pip --python "$work/bare" check -q
cd "$work"  # not the checkout, whose folder would be imported
"$work/bare/bin/metapretrain" --version
"$work/bare/bin/python" - "$here/../README.md" <<'PYTHON'
import re
import sys
from pathlib import Path

import metapretrain

assert "site-packages" in metapretrain.__file__, metapretrain.__file__
blocks = re.findall(r"^```python\n(.*?)^```", Path(sys.argv[1]).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
assert any("load_digits" in block for block in blocks), "the README has no example on digits"
names = {"__name__": "readme"}
for number, block in enumerate(blocks, start=1):
    exec(compile(block, f"README.md, block {number}", "exec"), names)
PYTHON
rm -rf "$work/bare"
