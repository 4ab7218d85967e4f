from __future__ import annotations

import os
import pathlib

# Child processes of tests find the fakes beside them by name; nothing in the product knows them.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(pathlib.Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)
