"""What the bench of large messages counts and prints."""

import mmap
import os

from bench.large_messages import Used, reset_peak, table, used

MIB = 1 << 20


def test_page_faults_cpu_and_the_peak_of_a_process_are_counted():
    pid = os.getpid()
    reset_peak(pid)
    before = used(pid)
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            mapped.madvise(mmap.MADV_NOHUGEPAGE)
        for at in range(0, len(mapped), mmap.PAGESIZE):
            mapped[at] = 1
    growth = used(pid) - before
    assert growth.faults >= 64 * MIB // mmap.PAGESIZE
    assert growth.cpu_s > 0
    assert growth.peak_bytes > 60 * MIB
    reset_peak(pid)
    assert (used(pid) - before).peak_bytes < 30 * MIB, "what was before the reset does not count"


def test_the_table_has_costs_a_mib_and_the_ratio_to_the_smallest():
    found = {
        ("Peeklock", "send", 1): (
            100,
            {"gateway": Used(0.1, 100, MIB), "worker": Used(0.1, 0, 0), "client": Used(1, 0)},
        ),
        ("Peeklock", "send", 64): (10, {"gateway": Used(2.56, 640 * 256, 192 * MIB), "worker": Used()}),
    }
    head, _, one, large = table(found).splitlines()
    assert head.startswith("| broker | mode | MiB | CPU, ms/MiB: gateway | worker | checkpointer | client |")
    assert one == "| Peeklock | send | 1 | 1.00 | 1.00 | 0.00 | 10.00 | 1.00 | 1 | 0 | 0 | 0 | 1.0 | 0.0 | 0.0 |"
    assert large == "| Peeklock | send | 64 | 4.00 | 0.00 | 0.00 | 0.00 | 2.00 | 256 | 0 | 0 | 0 | 3.0 | 0.0 | 0.0 |"
