"""The data directory: made private, locked, refused with a text that says what to do."""

import json
import stat
from pathlib import Path

import pytest

from storage.data_dir import (
    DataDirectory,
    DataDirectoryLocked,
    DataDirectoryUnwritable,
    Description,
    FewerPartitions,
    NetworkFileSystem,
    OtherPartitions,
    UnknownLayout,
    read_description,
)
from storage.durable import write_file
from tests.storage.partition_contents import said, start


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_missing_directory_is_made_for_its_owner_only(tmp_path: Path) -> None:
    with DataDirectory(tmp_path / "a" / "data", partitions=4) as directory:
        assert directory.partition_path(3) == tmp_path / "a" / "data" / "partitions" / "3"
        assert directory.run_path.is_dir()
        assert directory.root_key_path == directory.path / "root-key"
    assert mode(directory.path) == mode(directory.path / "partitions") == mode(directory.run_path) == 0o700
    assert read_description(directory.path) == Description(partitions=4)


def test_it_opens_again_with_the_same_number_of_partitions(tmp_path: Path) -> None:
    for _ in range(2):
        DataDirectory(tmp_path / "data", partitions=4).close()


def test_fewer_partitions_are_refused_naming_both_numbers(tmp_path: Path) -> None:
    DataDirectory(tmp_path / "data", partitions=4).close()
    with pytest.raises(FewerPartitions, match="of a namespace with 4 partitions, and 3 are configured"):
        DataDirectory(tmp_path / "data", partitions=3)
    DataDirectory(tmp_path / "data", partitions=4).close()


def test_more_partitions_are_there_once_it_has_grown(tmp_path: Path) -> None:
    path = tmp_path / "data"
    DataDirectory(path, partitions=4).close()
    for _ in range(2):  # a crash before `grow` changes nothing
        with DataDirectory(path, partitions=8) as directory:
            assert directory.grows_from == read_description(path) == Description(partitions=4)
    with DataDirectory(path, partitions=8) as directory:
        directory.grow()
        assert directory.grows_from is None
    assert read_description(path) == Description(partitions=8)
    with DataDirectory(path, partitions=8) as directory:
        assert directory.grows_from is None
    with pytest.raises(FewerPartitions):
        DataDirectory(path, partitions=4)


def test_a_workers_directory_gets_partitions_that_are_new_in_the_namespace(tmp_path: Path) -> None:
    path = tmp_path / "data"
    DataDirectory(path, partitions=4, owned=(0, 2)).close()
    for partitions, owned in (
        (4, (0,)),
        (4, (0, 1, 2)),  # 1 is another worker's
        (8, (2, 4)),
        (8, (0, 1, 2, 4)),
        (8, ()),
    ):
        with pytest.raises(OtherPartitions):
            DataDirectory(path, partitions=partitions, owned=owned)
    with DataDirectory(path, partitions=8, owned=(2, 0, 7)) as directory:
        assert directory.grows_from == Description(partitions=4, owned=(0, 2))
        directory.grow()
    assert read_description(path) == Description(partitions=8, owned=(0, 2, 7))
    DataDirectory(path, partitions=9, owned=(0, 2, 7)).close()
    whole = tmp_path / "whole"
    DataDirectory(whole, partitions=4).close()
    with pytest.raises(OtherPartitions):
        DataDirectory(whole, partitions=8, owned=(0, 1))


HOLD = """
import sys
from pathlib import Path
from storage.data_dir import DataDirectory
directory = DataDirectory(Path(sys.argv[1]), partitions=1)
print("open", flush=True)
sys.stdin.read()
"""


def test_a_directory_in_use_is_refused_naming_the_process_until_that_ends(tmp_path: Path) -> None:
    with start(HOLD, tmp_path / "data") as process:
        assert said(process) == "open"
        with pytest.raises(DataDirectoryLocked, match=f"in use by process {process.pid}: stop that broker"):
            DataDirectory(tmp_path / "data", partitions=1)
        process.kill()
    DataDirectory(tmp_path / "data", partitions=1).close()


def test_a_refused_directory_is_not_left_locked(tmp_path: Path) -> None:
    DataDirectory(tmp_path / "data", partitions=2).close()
    with pytest.raises(FewerPartitions):
        DataDirectory(tmp_path / "data", partitions=1)
    DataDirectory(tmp_path / "data", partitions=2).close()


# /proc takes no directories, whoever asks; a file is none
@pytest.mark.parametrize("parent", ["/proc", "file"])
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, parent: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / parent / "peeklock"
    with pytest.raises(DataDirectoryUnwritable, match=f"{path} cannot be written: .*choose another --data-dir"):
        DataDirectory(path, partitions=1)


def mount_table(tmp_path: Path, *mounts: tuple[Path, str]) -> Path:
    """A table in the form of /proc/self/mountinfo; `mounts` are mount points and types."""
    lines = ["22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"]
    for number, (point, kind) in enumerate(mounts, start=30):
        escaped = str(point).replace(" ", "\\040")
        lines.append(f"{number} 22 0:{number} / {escaped} rw,relatime shared:{number} master:1 - {kind} server:/x rw")
    table = tmp_path / "mountinfo"
    table.write_text("\n".join(lines) + "\n")
    return table


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "fuse.glusterfs", "lustre"]
)
def test_a_network_file_system_is_refused_naming_it(tmp_path: Path, kind: str) -> None:
    table = mount_table(tmp_path, (tmp_path / "share", kind))
    with pytest.raises(NetworkFileSystem, match=f"{tmp_path / 'share'} is of type {kind}, .*local disk"):
        DataDirectory(tmp_path / "share" / "deep" / "data", partitions=1, mount_table=table)
    assert not (tmp_path / "share").exists()


def test_a_local_file_system_is_taken(tmp_path: Path) -> None:
    table = mount_table(tmp_path, (tmp_path / "share", "nfs4"), (tmp_path / "volume", "xfs"))
    DataDirectory(tmp_path / "volume" / "data", partitions=1, mount_table=table).close()
    DataDirectory(tmp_path / "shared-by-name-only", partitions=1, mount_table=table).close()


def test_the_innermost_mount_counts_and_of_equal_ones_the_last(tmp_path: Path) -> None:
    table = mount_table(tmp_path, (tmp_path / "share", "nfs4"), (tmp_path / "share" / "local", "ext4"))
    DataDirectory(tmp_path / "share" / "local" / "data", partitions=1, mount_table=table).close()
    table = mount_table(tmp_path, (tmp_path / "over", "nfs4"), (tmp_path / "over", "ext4"))
    DataDirectory(tmp_path / "over" / "data", partitions=1, mount_table=table).close()


def test_a_mount_point_with_a_space_and_a_way_in_by_a_link(tmp_path: Path) -> None:
    table = mount_table(tmp_path, (tmp_path / "net work", "nfs"))
    (tmp_path / "link").symlink_to(tmp_path / "net work")
    with pytest.raises(NetworkFileSystem):
        DataDirectory(tmp_path / "link" / "data", partitions=1, mount_table=table)


def test_a_system_without_mount_table_refuses_nothing(tmp_path: Path) -> None:
    DataDirectory(tmp_path / "data", partitions=1, mount_table=tmp_path / "none").close()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "not a description"),
        ("[]", "not a description"),
        ('{"layout-version": 1}', "not a description"),
        ('{"layout-version": 3, "partitions": 1}', "layout version 3 found, 2 supported"),
        ('{"layout-version": 0, "partitions": 1}', "layout version 0 found"),
        ('{"layout-version": true, "partitions": 1}', "layout version True found"),
        ('{"layout-version": "1", "partitions": 1}', "layout version '1' found"),
        ('{"layout-version": 2, "partitions": 0}', "number of partitions is 0"),
        ('{"layout-version": 1, "partitions": 0}', "number of partitions is 0"),
        ('{"layout-version": 1, "partitions": true}', "number of partitions is True"),
    ],
)
def test_a_description_of_another_kind_is_refused_and_left_untouched(tmp_path: Path, content: str, text: str) -> None:
    file = tmp_path / "peeklock.json"
    file.write_text(content)
    with pytest.raises(UnknownLayout, match=text):
        DataDirectory(tmp_path, partitions=1)
    assert file.read_text() == content


def test_a_directory_of_the_layout_without_logs_is_opened_and_refused_by_brokers_of_that_layout_since(
    tmp_path: Path,
) -> None:
    content = '{"layout-version": 1, "partitions": 2}'
    file = tmp_path / "peeklock.json"
    file.write_text(content)
    (tmp_path / "partitions").mkdir()
    assert read_description(tmp_path) == Description(partitions=2, layout_version=1)
    with pytest.raises(FewerPartitions):
        DataDirectory(tmp_path, partitions=1)
    assert file.read_text() == content
    DataDirectory(tmp_path, partitions=2).close()
    assert json.loads(file.read_text()) == {"layout-version": 2, "partitions": 2}


@pytest.mark.parametrize("name", ["partitions", "logs"])
def test_partitions_and_logs_without_a_description_are_not_taken_over(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UnknownLayout, match=rf"has {name}/ but no peeklock\.json"):
        DataDirectory(tmp_path, partitions=1)
    assert not (tmp_path / "peeklock.json").exists()


def test_the_stores_that_were_made_are_noted_and_stay_so(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with DataDirectory(path, partitions=4) as directory:
        assert directory.is_new
        assert directory.described().stores is None
        for number in range(4):
            directory.partition_path(number).mkdir()
        directory.note_stores((0, 2))
        directory.note_stores((1,))
    with DataDirectory(path, partitions=4) as directory:
        assert not directory.is_new
        assert directory.described().stores == (0, 1, 2)
    with DataDirectory(path, partitions=6) as directory:
        directory.grow()
        assert directory.described() == Description(6, stores=(0, 1, 2))


@pytest.mark.parametrize("stores", ["null", "2", '"0"', "[2]", "[-1]", "[true]", '["0"]', "[0.5]"])
def test_a_description_with_stores_that_cannot_be_is_refused(tmp_path: Path, stores: str) -> None:
    (tmp_path / "peeklock.json").write_text(f'{{"layout-version": 2, "partitions": 2, "stores": {stores}}}')
    with pytest.raises(UnknownLayout, match="the partitions in it are"):
        DataDirectory(tmp_path, partitions=2)


def test_the_description_is_for_people_to_read(tmp_path: Path) -> None:
    DataDirectory(tmp_path / "data", partitions=4).close()
    document = json.loads((tmp_path / "data" / "peeklock.json").read_text())
    assert document == {"layout-version": 2, "partitions": 4}


def test_a_written_file_replaces_the_old_one_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_file(file, b"old")
    write_file(file, b"new")
    assert file.read_bytes() == b"new"
    assert mode(file) == 0o600
    assert list(tmp_path.iterdir()) == [file]
