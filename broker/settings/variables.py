"""Names of the variables that Peeklock reads, and the file of settings that one of them names.

The first modules of a start import this one, before anything heavy: keep it light.
"""

import os

VARIABLE_PREFIX = "PEEKLOCK_"  # of all settings in the environment
CONFIG_VARIABLE = "PEEKLOCK_CONFIG"
IMAGE_VARIABLE = "PEEKLOCK_IMAGE"  # no setting: see `broker.settings.emulators_place`
PURE_VARIABLE = "PEEKLOCK_PURE"  # no setting: see `protocol.extension`


def config_file(text: str) -> str:
    """Return the file of PEEKLOCK_CONFIG: of several, with colons between them, the first that is there or the last."""
    paths = text.split(":")
    return next((path for path in paths if os.path.exists(path)), paths[-1])  # noqa: PTH110 - pathlib is slow to import
