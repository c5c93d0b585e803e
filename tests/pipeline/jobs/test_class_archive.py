"""The archive of classes with which jobs start faster. `make spark` has written it."""

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from broker.cli.all_commands import app

pytest.importorskip("pyspark")

from pipeline.jobs import classes, rehearsal, running
from pyspark_peeklock import readiness
from tests.patience import PATIENCE_S

needs_archive = pytest.mark.skipif(not classes.ARCHIVE.exists(), reason="make spark writes the archive")


@needs_archive
def test_the_jvm_of_a_job_maps_it(spark):
    """This session is made with the same options."""
    jvm = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
    assert str(classes.ARCHIVE) in Path(f"/proc/{jvm}/maps").read_text()


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_a_jvm_goes_on_without_one_that_is_none_and_says_nothing(tmp_path, content):
    archive = tmp_path / "spark-classes.jsa"
    archive.write_bytes(content)
    command = [readiness.java_command(), *classes.reading(archive).split(), "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith(("openjdk", "java")), ran.stdout


@needs_archive
def test_one_that_was_cut_off_is_refused(tmp_path):
    rehearsal.must_be_whole(classes.ARCHIVE)
    archive = tmp_path / "spark-classes.jsa"
    archive.write_bytes(classes.ARCHIVE.read_bytes()[:100_000_000])
    with pytest.raises(running.NotDone, match="Java cannot read what it wrote"):
        rehearsal.must_be_whole(archive)


def test_there_are_no_options_without_one_or_where_its_name_would_be_two(tmp_path):
    assert classes.reading(tmp_path / "none.jsa") == ""
    spaced = tmp_path / "a name" / "classes.jsa"
    spaced.parent.mkdir()
    spaced.touch()
    assert classes.reading(spaced) == ""


def test_the_one_that_writes_an_archive_does_not_read_one(monkeypatch, tmp_path):
    archive = tmp_path / "classes.jsa"
    archive.touch()
    assert classes.reading(archive) != ""
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Dother=1")
    environment = classes.writing(archive)
    assert environment["SPARK_SUBMIT_OPTS"] == f"-Dother=1 -XX:ArchiveClassesAtExit={archive}"
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", environment["SPARK_SUBMIT_OPTS"])
    assert classes.reading(archive) == ""


def test_a_rehearsal_that_fails_leaves_the_older_archive(monkeypatch, tmp_path):
    archive = tmp_path / "classes.jsa"
    archive.write_text("older")
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--no-such-option pyspark-shell")
    with pytest.raises(running.NotDone, match=r"(?s)no archive of classes was written: .*JAVA_GATEWAY_EXITED"):
        rehearsal.write_archive(archive)
    assert [each.name for each in tmp_path.iterdir()] == ["classes.jsa"]
    assert archive.read_text() == "older"


def test_prepare_says_in_one_line_that_there_is_no_java(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    run = CliRunner().invoke(app, ["jobs", "prepare"])
    assert run.exit_code == running.NOT_DONE
    assert run.stderr.splitlines()[-1].startswith("peeklock: Spark needs Java")
