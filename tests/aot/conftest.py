"""The table of what the compiles told, at the end of the run."""

import json


def pytest_terminal_summary(terminalreporter):
    reports = terminalreporter.getreports("passed")
    rows = [json.loads(v) for r in reports for k, v in r.user_properties if k == "aot"]
    if not rows:
        return
    terminalreporter.section("ahead-of-time compiles (MiB of one device)")
    head = ("target", "case", "program", "s", "args", "temp", "state", "floor")
    line = "{:9} {:16} {:8} {:>6} {:>8} {:>7} {:>7} {:>8}  {}".format
    terminalreporter.write_line(line(*head, "collectives in blocks / in all"))
    for target, case, r in rows:
        mib = [
            f"{r[name] / 2**20:.1f}"
            for name in ("argument_bytes", "temp_bytes", "alias_bytes", "floor_bytes")
        ]
        counts = [
            " ".join(f"{k}:{v[0]}" for k, v in r[name].items()) or "none"
            for name in ("block_collectives", "collectives")
        ]
        seconds = f"{r['seconds']:.1f}"
        terminalreporter.write_line(
            line(target, case, r["program"], seconds, *mib, " / ".join(counts))
        )
