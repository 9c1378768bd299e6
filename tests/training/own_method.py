"""A method of the user's own, for ``--method own_method:...``."""

from zetaclip import Method
from zetaclip.control import Constant

FIXED = Method(name="fixed", controller=Constant(0.5))
NUMBER = 3


def made(clip: float = 1.0) -> Method:
    return Method(name="made", controller=Constant(clip))
