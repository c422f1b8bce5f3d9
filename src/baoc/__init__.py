"""baoc: training memory as a budget you set."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baoc._api import *  # noqa: F403
    from baoc._api import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        """Import the public names when the first one is used: ``baoc --help`` does not need torch."""
        if name.startswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        api = import_module("baoc._api")
        globals().update({public: getattr(api, public) for public in ("__all__", *api.__all__)})
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        __getattr__("__all__")
        return sorted(globals())
