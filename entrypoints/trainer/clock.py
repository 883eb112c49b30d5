"""The launcher's clock, where `trainer` is at the top as on a node and below another package as in a plan."""

try:
    from ..launcher.clock import SYSTEM, Clock
except ImportError:
    from launcher.clock import SYSTEM, Clock

__all__ = ["SYSTEM", "Clock"]
