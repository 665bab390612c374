"""What the Trace Event Format asks of a trace."""

from collections import defaultdict


def check(entries):
    """What the format asks for: fields by phase, names for all that is shown, and spans that are nested or apart."""
    named, threads = set(), defaultdict(list)
    for entry in entries:
        assert {"name", "ph", "ts", "pid", "tid"} <= set(entry)
        assert entry["ph"] in ("X", "M") and entry["ts"] >= 0
        if entry["ph"] == "M":
            assert entry["args"]
            named.add((entry["name"], entry["pid"], entry["tid"]))
        else:
            assert entry["dur"] >= 0 and entry["name"] and isinstance(entry["cat"], str)
            threads[entry["pid"], entry["tid"]].append((entry["ts"], -entry["dur"]))
    for process, thread in threads:
        assert ("process_name", process, 0) in named and ("thread_name", process, thread) in named
    for spans in threads.values():
        open_until = []
        for start, minus in sorted(spans):
            end = start - minus
            while open_until and open_until[-1] <= start + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6
            open_until.append(end)
    return threads
