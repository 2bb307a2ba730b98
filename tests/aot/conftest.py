"""The table of what the compiles told, at the end of the run."""

import json


def pytest_terminal_summary(terminalreporter):
    reports = terminalreporter.getreports("passed")
    found = {"aot": [], "kernel": []}
    for name, value in (pair for r in reports for pair in r.user_properties):
        if name in found:
            found[name].append(json.loads(value))
    if found["aot"]:
        _programs(terminalreporter, found["aot"])
    if found["kernel"]:
        _kernels(terminalreporter, found["kernel"])


def _programs(terminalreporter, rows):
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


def _kernels(terminalreporter, rows):
    terminalreporter.section("kernels compiled ahead of time (MiB)")
    line = "{:9} {:26} {:28} {:>5} {:>8} {:>8} {:>9}".format
    head = ("target", "kernel", "case", "s", "args", "temp", "accessed")
    terminalreporter.write_line(line(*head))
    for target, module, name, r in rows:
        accessed = r["accessed_bytes"]
        terminalreporter.write_line(
            line(
                target,
                module.removesuffix("_cases"),
                name,
                f"{r['seconds']:.1f}",
                f"{r['argument_bytes'] / 2**20:.1f}",
                f"{r['temp_bytes'] / 2**20:.2f}",
                "" if accessed is None else f"{accessed / 2**20:.1f}",
            )
        )
