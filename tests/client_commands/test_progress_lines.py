"""Progress in logs."""

from broker.cli.progress import LINE_SECONDS, Lines


def test_a_line_now_and_then_with_an_estimate():
    now, written = [0.0], []
    lines = Lines("rows", None, written.append, lambda: now[0])
    lines.expect(1000)
    lines.advance(10)
    now[0] = LINE_SECONDS - 0.1
    lines.advance(90)
    assert written == []
    now[0] = LINE_SECONDS
    lines.advance(0)
    assert written == ["rows: 100 of 1000, about 270 s left\n".replace("270 s", "4 min")]
    lines.expect(1000)
    now[0] = 2 * LINE_SECONDS
    lines.advance(1500)
    assert written[1:] == ["rows: 1600 of 2000, about 15 s left\n"]


def test_without_a_total_there_is_no_estimate():
    now, written = [0.0], []
    lines = Lines("rows", None, written.append, lambda: now[0])
    now[0] = LINE_SECONDS
    lines.advance(7)
    assert written == ["rows: 7\n"]
