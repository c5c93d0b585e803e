import re
from pathlib import Path

from protocol import conditions
from protocol.codec import Symbol

CONDITIONS = {name: value for name, value in vars(conditions).items() if name.isupper()}


def test_each_condition_has_one_name_and_is_a_symbol():
    assert len(set(CONDITIONS.values())) == len(CONDITIONS)
    assert all(type(value) is Symbol for value in CONDITIONS.values())


def test_a_condition_is_named_as_it_is_spelt():
    for name, value in CONDITIONS.items():
        words = re.split("[-:]", value)
        expected = "_".join(words[1:]).upper()
        assert name in (expected, f"MICROSOFT_{expected}")


def test_no_other_module_spells_an_error_condition():
    root = Path(conditions.__file__).parent.parent
    # com.microsoft:timeout is also the key of a link property.
    spelt = re.compile("|".join(f'"{re.escape(value)}"' for value in CONDITIONS.values() if "timeout" not in value))
    modules = [path for folder in ("protocol", "broker", "storage") for path in (root / folder).rglob("*.py")]
    found = [path.name for path in modules if spelt.search(path.read_text())]
    assert found == ["conditions.py"]
