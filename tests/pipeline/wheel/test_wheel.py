"""The wheel pyspark-peeklock in an environment that has nothing else of ours, with the Spark of a cluster."""

import json
import re
import shutil
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from broker import __version__
from tests.pipeline.wheel.conftest import ORDERS
from tests.pipeline.wheel.environments import Environment
from tests.sources import ROOT

PROGRAM = Path(__file__).with_name("cluster_program.py")
BODIES = sorted(json.dumps(order) for order in ORDERS)


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("environment") / "venv", wheel)


def ran(environment, shop, capture, directory, *options):
    """What the program found."""
    spark_submit = Path(str(find_spec("pyspark").origin)).parent / "bin" / "spark-submit"
    arguments = (directory / "secret", f"http://localhost:{shop.http_port}", capture)
    said = environment.submit(spark_submit, directory, *options, PROGRAM, *arguments)
    return json.loads(said.splitlines()[-1])


def test_it_is_for_all_machines_and_has_neither_broker_nor_extension(wheel):
    assert wheel.name == f"pyspark_peeklock-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {
        "pyspark_peeklock",
        "protocol",
        "storage",
        f"pyspark_peeklock-{__version__}.dist-info",
    }
    others = {name for name in names if not name.endswith(".py") and ".dist-info/" not in name}
    assert others == {"pyspark_peeklock/LICENSE", "pyspark_peeklock/py.typed"}


def test_the_program_registers_the_source_as_the_page_says():
    page = (ROOT / "docs" / "tables.md").read_text()
    [example] = re.findall(r"^### Databricks$.*?^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    program = {line.strip() for line in PROGRAM.read_text().splitlines()}
    assert {*example.splitlines()} - {""} <= program


def test_it_asks_for_versions_that_peeklock_asks_for():
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wheels = tomllib.loads((ROOT / "pipeline" / "pyproject.toml").read_text())["project"]
    assert set(wheels["dependencies"]) < {*ours["dependencies"], *ours["optional-dependencies"]["spark"]}
    assert wheels["requires-python"] == ours["requires-python"]


def test_a_cluster_that_has_installed_it_reads_and_sends(environment, shop, capture, tmp_path):
    found = ran(environment, shop, capture, tmp_path)
    assert Path(found.pop("package")).is_relative_to(environment.bin.parent)
    assert found == {"captured": 3, "journal": 3, "browsed": BODIES}


def test_a_program_brings_it_along(environment, wheel, shop, capture, tmp_path):
    environment.pip("uninstall", "--yes", "pyspark-peeklock")
    archive = tmp_path / "pyspark_peeklock.zip"  # Spark's workers would not find a file that ends in .whl
    shutil.copy(wheel, archive)
    found = ran(environment, shop, capture, tmp_path, "--py-files", archive)
    assert archive.name in found.pop("package")
    assert found == {"captured": 3, "journal": 3, "browsed": BODIES}
