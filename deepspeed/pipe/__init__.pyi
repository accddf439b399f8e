# Type checkers look for files, and the modules below this package are made at import: all their names are Any to them.
from typing import Any

def __getattr__(name: str) -> Any: ...
