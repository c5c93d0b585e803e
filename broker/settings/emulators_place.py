"""Whether the image stands in for the Service Bus emulator although nobody has given it a Config.json.

Testcontainers' modules, and compose files that live on the emulator's default entities, set no more than ACCEPT_EULA.
Then the image is the emulator: with its well-known key, which lets in whoever can connect. So nothing may say that
it is meant to be anything else: neither a file, nor an option, nor a key of its own.
"""

import filecmp
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from broker.settings.config import Settings
from broker.settings.variables import IMAGE_VARIABLE
from storage.data_dir import ROOT_KEY_FILE

ACCEPTED_VARIABLE: Final = "ACCEPT_EULA"  # the emulator's own
CONFIG_FILE: Final = "Config.json"  # in the image's directory: what the emulator has by default
BUILT_IN_FILE: Final = "peeklock.toml"  # there, too: the file of settings as the image was built with it


def image_of_emulator(environment: Mapping[str, str]) -> Path | None:
    """Return the directory of the image's own files, where this is the image and the emulator's licence is accepted."""
    is_accepted = environment.get(ACCEPTED_VARIABLE, "").strip().upper() == "Y"
    directory = environment.get(IMAGE_VARIABLE)
    return Path(directory) if is_accepted and directory else None


def reason_against(image: Path, file: Path, given: Mapping[str, Any], *, is_named: bool) -> str | None:
    """Return why the image is not the emulator, or None if it is.

    `file` is the one that would be read, and `is_named` says whether an option names it. `given` are the values of
    flags and variables, by section and name, not checked yet.
    """
    if is_named or not _is_built_in(file, image / BUILT_IN_FILE):
        return f"settings come from {file}"
    if _in(given, "security").get("root_key") is not None:
        return "security.root_key is set"
    if given.get("emulator") is False:
        return "emulator is off"
    if _in(given, "cluster").get("workers"):
        return "this is a part of a namespace on several machines"
    data_dir = given.get("data_dir", Settings.model_fields["data_dir"].default)
    key = Path(str(data_dir)) / ROOT_KEY_FILE
    if os.path.lexists(key):
        return f"the data directory has a key of its own: {key}"
    return None


def _in(given: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    values = given.get(section)
    return values if isinstance(values, Mapping) else {}


def _is_built_in(file: Path, built_in: Path) -> bool:
    try:
        return filecmp.cmp(file, built_in, shallow=False)
    except OSError:
        return False
