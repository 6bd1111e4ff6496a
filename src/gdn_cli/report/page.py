"""A book -> one HTML file: no script, no network, readable on a phone and when printed.

Everything that comes from records is escaped; the figures are SVG inside the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .. import __version__, comparison, units
from ..text import html as escape
from ..timing import COPY, FLOORS
from . import figures, findings, provenance, verdicts
from .drawing import Drawing, slug, svg
from .figures import pair_name
from .findings import Tiers
from .gather import Book, Group, Point, label_of
from .verdicts import Note

# what a page can be narrowed to, in its order
PARTS = ("times", "latency", "floor", "ladder", "spread", "tiers", "compare", "score", "checks", "notes", "environment")


def page(book: Book, title: str, parts: Iterable[str] = PARTS, unit: str = "auto") -> str:
    """The whole document. Raises MissingError where a figure is asked for and matplotlib is missing."""
    parts = tuple(parts)
    sections = [_op(book, op, parts, unit) for op in book.ops]
    contents = ""
    if len(sections) > 1:
        links = "".join(f'<li><a href="#{slug(op)}">{escape(op)}</a></li>' for op in book.ops)
        contents = f'<nav aria-label="Contents"><ul>{links}</ul></nav>'
    notes = _notes(verdicts.file_notes(book), "Of the files", "files") if "notes" in parts else ""
    environment = _environment(book) if "environment" in parts else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light only">
<meta name="generator" content="gdn {escape(__version__)}">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_CSS}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{_facts(book)}
{contents}
</header>
<main>
{"".join(sections)}
{notes}
{environment}
</main>
</body>
</html>
"""


def title_of(book: Book) -> str:
    """gdn_decode on NVIDIA H200."""
    devices = dict.fromkeys(m.device for m in book.measured)
    return f"{units.listed(book.ops)} on {units.listed(devices)}" if book.measured else "No records"


def _facts(book: Book) -> str:
    """Where it all comes from, in a list of a few lines."""
    files = [f"{s.name}: {s.time}" + (f", commit {s.commit}" if s.commit else "") for s in book.sources]
    facts = {
        "Device": [", ".join(dict.fromkeys(m.device for m in book.measured))],
        "Tier": [_tier_list(book)],
        "Records": files,
    }
    rows = "".join(
        f"<div><dt>{name}</dt>{''.join(f'<dd>{escape(value)}</dd>' for value in values)}</div>"
        for name, values in facts.items()
    )
    return f'<dl class="facts">{rows}</dl>'


def _tier_list(book: Book) -> str:
    tiers, states = dict.fromkeys(g.tier for g in book.groups), {g.l2 for g in book.groups} - {None}
    if len(states) > 1:
        return ", ".join(dict.fromkeys(g.how for g in book.groups))
    return ", ".join([*tiers, *(f"L2 {state}" for state in states)]) or "none: checks only"


def _op(book: Book, op: str, parts: tuple[str, ...], unit: str) -> str:
    known = book.registry.ops.get(op)
    out = [f'<section id="{slug(op)}"><h2>{escape(op)}</h2>']
    if known:
        out.append(f"<p>{escape(known.summary)}.</p>")
    notes = verdicts.notes(book, op)
    if "notes" in parts and (warning := _warning(notes, op)):
        out.append(warning)
    groups, side_by_side = book.of(op), findings.tiers(book, op) if "tiers" in parts else []
    for device in dict.fromkeys(g.device for g in groups):
        own = [g for g in groups if g.device == device]
        # the most exact tier has every figure; of the others those that the tables side by side do not hold
        whole = [g for g in own if g is own[0] or not any(t.hold(g) for t in side_by_side)]
        for group in whole:
            out += _group(book, group, parts, unit, alone=len(groups) == 1)
        for i, t in enumerate(side_by_side):
            if t.groups[0].device == device:
                out += _tiers(book, op, i, t)
        others = [d for g in own if g not in whole and "latency" in parts for d in figures.latency(book, g)]
        out.append(_figures(others))
    if "compare" in parts:
        out += _compare(book, op)
    if "score" in parts:
        out += _scores(book, op)
    if "checks" in parts:
        out += _checks(book, op)
    if "notes" in parts:
        out.append(_notes(notes, "Failures, doubts and notes", f"{slug(op)}-notes"))
    return "\n".join([*out, "</section>\n"])


def _warning(notes: list[Note], op: str) -> str:
    """What a reader must see before the numbers."""
    counts = [(sum(n.kind == kind for n in notes), one) for kind, one in (("failed", "failure"), ("doubt", "doubt"))]
    said = units.listed(units.count(n, one) for n, one in counts if n)
    return f'<p class="bad">With {said}: <a href="#{slug(op)}-notes">see the notes</a>.</p>' if said else ""


def _group(book: Book, group: Group, parts: tuple[str, ...], unit: str, alone: bool) -> Iterator[str]:
    if not alone:
        yield f"<h3>{escape(group.device)}, {escape(group.how)}</h3>"
    yield f'<p class="origin">{escape(provenance.origin(group))}</p>'
    if said := findings.headline(book, group):
        yield f'<p class="headline">{escape(" ".join(said))}</p>'
    if "times" in parts:
        yield _times(group, unit)
    yield _figures([d for name, make in figures.PARTS.items() if name in parts for d in make(book, group)])
    if "ladder" in parts:
        yield _ladder(book, group)


# --- tables ---------------------------------------------------------------------------------------------------------

_ACROSS = 10  # from so many sizes on they go down instead of across


def _table(caption: str, head: list[str], rows: list[list[str]], *, note: str = "", words: bool = False) -> str:
    """Cells are HTML already; the first of each row is its header. Columns whose name begins with '<' hold words and
    stand on the left, others hold numbers. With `words`, cells may fold."""
    left = [name.startswith("<") for name in head]
    mark = [' class="l"' if is_left else "" for is_left in left]
    columns = "".join(f'<th scope="col"{m}>{name.removeprefix("<")}</th>' for name, m in zip(head, mark, strict=True))
    body = ""
    for row in rows:
        cells = [f'<th scope="row">{row[0]}</th>']
        cells += [f"<td{m}>{cell}</td>" for cell, m in zip(row[1:], mark[1:], strict=True)]
        body += f"<tr>{''.join(cells)}</tr>"
    label = escape(caption)
    note = f'<p class="note">{note}</p>' if note else ""
    return (
        f'<div class="scroll{" words" if words else ""}" role="region" aria-label="{label}" tabindex="0"><table>'
        f"<caption>{label}</caption><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>{note}"
    )


def _times(group: Group, unit: str) -> str:
    labels, algos = group.labels, group.algos
    shared = {label: group.shared(label) for label in labels}
    known = [us for a in algos for label in labels if (us := group.median_us(a, label)) is not None]
    unit_ = units.table_unit(known, unit)
    has_floor = COPY in algos
    doubted = False

    def named(label: str) -> str:
        return escape(label) + (f" <small>({shared[label]})</small>" if shared[label] > 1 else "")

    def cell(algo: str, label: str) -> str:
        nonlocal doubted
        point = group.points.get((algo, label))
        if point is None or (us := point.median_us) is None:
            return _status(point)
        text = units.cell(us, unit_)
        text = f"<b>{text}</b>" if group.fastest(label) == algo else text
        if point.doubted:
            doubted, text = True, f"{text} ?"
        over = group.over_floor(algo, label) if algo not in FLOORS else None
        return text + (f"<small>{units.three(over)}x</small>" if over is not None else "")

    if len(labels) > _ACROSS:
        head = ["<size", *map(escape, algos)]
        rows = [[named(label), *(cell(a, label) for a in algos)] for label in labels]
    else:
        head = ["<algo", *map(named, labels)]
        rows = [[escape(a), *(cell(a, label) for label in labels)] for a in algos]
    words = ["Bold: the fastest."]
    words += [f"Below each time: how many times the {COPY} floor."] if has_floor else []
    words += ["(n): the median over so many workloads."] if max(shared.values(), default=0) > 1 else []
    words += ["?: not to be trusted as it stands, see the notes."] if doubted else []
    caption = f"Median times in {unit_}" if unit_ else "Median times"
    return _table(f"{caption}, {group.how}", head, rows, note=" ".join(words))


def _ladder(book: Book, group: Group) -> str:
    found = findings.rungs(book, group)
    if len([r for r in found if r.mean_us]) < 2:
        return ""

    def factor(value: float | None) -> str:
        return units.times(value) if value is not None else ""

    rows = [
        [
            escape(r.algo), escape(r.after or ("peer" if r.peer else "")),
            r.mean, factor(r.speedup), factor(r.step),
            factor(r.over_floor), f"{r.right}/{r.of}",
        ]
        for r in found
    ]  # fmt: skip
    head = ["<algo", "<after", "mean time", "speedup", "over the rung below", "x floor", "workloads"]
    note = "Geometric means over the workloads that the algos share; the speedup is over the reference."
    return _table("The ladder", head, rows, note=note)


def _tiers(book: Book, op: str, i: int, t: Tiers) -> Iterator[str]:
    yield "<h3>Tiers side by side</h3>"
    yield "<p>A tier is a way to time. Nothing is divided across them: a gap is in microseconds.</p>"
    yield "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in t.said) + "</ul>"
    yield _figures(figures.tiers(op, i, t))
    rows = []
    for label, algo, medians in t.rows:
        cells = []
        for group, us in zip(t.groups, medians, strict=True):
            point = group.points.get((algo, label))
            if us is None:
                cells.append(_status(point))
                continue
            gap = f"<small>{units.gap(us - medians[0])}</small>" if cells and medians[0] is not None else ""
            cells.append(units.duration(us) + (" ?" if point.doubted else "") + gap)
        rows.append([escape(algo), escape(label), *cells])
    head = ["<algo", "<size", *map(escape, t.names)]
    yield _table("Median times by tier", head, rows, note=f"Small: the gap to {escape(t.names[0])}.")


def _status(point: Point | None) -> str:
    """What stands where a time would."""
    failed = point.failed if point else None
    return f'<span class="bad">{escape(failed.record["status"].replace("_", " "))}</span>' if failed else ""


def _compare(book: Book, op: str) -> Iterator[str]:
    overall, each = book.extra("overall", op), book.extra("comparisons", op)
    if not (overall or each):
        return
    yield "<h3>Compared in turns</h3>"
    yield "<p>Calls of both took turns. The ratio is how many times as fast as the baseline.</p>"
    yield _figures(figures.compare(book, op))
    if overall:
        rows = []
        for source, item in overall:
            own = [c for _, c in each if pair_name(source, c) == pair_name(source, item)]
            counts = [sum(c.get("verdict") == v for c in own) for v in ("FASTER", "SAME", "SLOWER")]
            rows.append([escape(pair_name(source, item)), *_ratio(item), *map(str, counts)])
        head = ["<pair", "ratio", "<interval", "<verdict", "faster", "same", "slower"]
        yield _table("Over all workloads, geometric means", head, rows)
    if each:
        known = book.registry.ops.get(op)
        placed = [(*label_of(known, (c.get("workload") or {}).get("axes") or {}), s, c) for s, c in each]
        placed.sort(key=lambda p: (pair_name(p[2], p[3]), p[1]))
        rows = [
            [
                escape(label),
                escape(str((c.get("workload") or {}).get("uuid") or "")[:8]),
                escape(pair_name(s, c)),
                *_ratio(c),
            ]
            for label, _, s, c in placed
        ]
        yield _table("By workload", ["<size", "<workload", "<pair", "ratio", "<interval", "<verdict"], rows)


def _ratio(item: dict[str, Any]) -> list[str]:
    ratio, low, high = (item.get(k) for k in ("ratio", "low", "high"))

    def three(x: Any) -> str:
        return f"{x:.3f}" if isinstance(x, (int, float)) else "-"

    return [f"{three(ratio)}x", f"{three(low)} to {three(high)}", f"<b>{escape(comparison.verdict(item))}</b>"]


def _scores(book: Book, op: str) -> Iterator[str]:
    found = [s for _, s in book.extra("scores", op)]
    if not found:
        return
    rows = []
    for s in found:
        value = s.get("value")
        value = units.times(value) + (" ?" if s.get("doubtful") else "") if isinstance(value, (int, float)) else "-"
        shares, missing = len(s.get("shares") or []), len(s.get("missing") or [])
        most = ", ".join(f"{label} {share:.0%}" for label, share in (s.get("by_label") or [])[:3])
        cells = [s.get("algo"), s.get("tier"), s.get("against"), value, f"{shares}/{shares + missing}"]
        rows.append([escape(str(c)) for c in cells] + [escape(str(s.get("reason") or most))])
    yield "<h3>Forecast of the contest's score</h3>"
    yield _table("Scores", ["<algo", "<tier", "<over", "score", "workloads", "<most of it from"], rows)


def _checks(book: Book, op: str) -> Iterator[str]:
    found = verdicts.checks(book, op)
    if not found:
        return
    outputs = list(dict.fromkeys(name for c in found for name in c.errors))
    known = book.registry.ops.get(op)
    places = [c.device + (", interpreted" if c.mode == "interpreter" else "") for c in found]
    several = len(set(places)) > 1
    rows = []
    for c, place in zip(found, places, strict=True):
        right = f"{c.right}/{c.of}" if c.right == c.of else f'<span class="bad">{c.right}/{c.of}</span>'
        errors = [f"{c.errors[name]:.1e}" if name in c.errors else "" for name in outputs]
        rows.append([escape(c.algo), *([escape(place)] if several else []), right, *errors])
    if known and outputs:
        limits = [f"{known.tolerance[name]:g}" if name in known.tolerance else "" for name in outputs]
        rows.append(["at most", *([""] if several else []), "", *limits])
    yield "<h3>Checks</h3>"
    head = ["<algo", *(["<on"] if several else []), "right", *map(escape, outputs)]
    note = "The numbers are the largest relative Frobenius error of each output, against float64." if outputs else ""
    yield _table("Workloads that each algo is right on", head, rows, note=note)


def _notes(notes: list[Note], heading: str, name: str) -> str:
    if not notes:
        return ""
    items = "".join(
        f'<li><b class="{"bad" if n.kind in ("failed", "interrupted") else "kind"}">{escape(n.kind)}</b> '
        f"{escape(n.text)}</li>"
        for n in notes
    )
    return f'<h3 id="{name}">{escape(heading)}</h3><ul class="notes">{items}</ul>'


def _environment(book: Book) -> str:
    columns = [provenance.environment(source, place) for source in book.sources for place in source.places]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[escape(name), *(escape(column.get(name, "")) for column in columns)] for name in names if name != "file"]
    out = ['<section id="environment"><h2>Environment</h2>']
    out.append(_table("Where it was measured", ["<", *(f"<{escape(c['file'])}" for c in columns)], rows, words=True))
    hashes = [[*map(escape, what), escape(", ".join(files))] for *what, files in provenance.hashes(book)]
    if hashes:
        out.append(_table("Sources that ran", ["<op", "<algo", "<hash", "<files"], hashes, words=True))
    return "".join([*out, "</section>"])


def _figures(drawings: list[Drawing]) -> str:
    if not drawings:
        return ""
    inner = "".join(
        f"<figure>{svg(d)}<figcaption><b>{escape(d.title)}.</b> {escape(d.words)}</figcaption></figure>"
        for d in drawings
    )
    return f'<div class="figures">{inner}</div>'


_CSS = """
*{box-sizing:border-box}
html{color-scheme:light only;-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:14px;max-width:1240px;background:#fff;color:#1a1a1a;
 font:16px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:1.55rem;line-height:1.2;margin:.4rem 0 .6rem}
h2{font-size:1.3rem;margin:2.2rem 0 .4rem;padding-top:.6rem;border-top:2px solid #1a1a1a}
h3{font-size:1.08rem;margin:1.8rem 0 .4rem}
h4{margin:1.2rem 0 .3rem}
h1,h2,h3,p,li,dd,figcaption{overflow-wrap:anywhere}
p{margin:.4rem 0;max-width:75ch}
ul{padding-left:1.1rem}
a{color:#00508a}
.facts{display:flex;flex-wrap:wrap;gap:.35rem 2.4rem;margin:.6rem 0}
.facts div{min-width:0;max-width:100%}
.facts dt{font-size:.8rem;color:#5f5f5f}
.facts dd{margin:0}
nav ul{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;padding:0;list-style:none}
.origin,.note,figcaption{color:#505050;font-size:.86rem}
.headline{font-size:1.05rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,470px),1fr));gap:1.4rem 2rem;margin:1rem 0;
 align-items:start}
figure{margin:0;min-width:0;max-width:600px}
figure svg{display:block;width:100%;height:auto;overflow:visible}
figure svg *{stroke-linejoin:round;stroke-linecap:butt}
figcaption b{color:#1a1a1a}
.scroll{overflow-x:auto;margin:.9rem 0 .2rem;max-width:100%}
.scroll:focus-visible{outline:2px solid #00508a;outline-offset:2px}
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding-bottom:.3rem}
th,td{padding:.22rem .7rem .22rem 0;text-align:right;vertical-align:top;white-space:nowrap}
th{font-weight:500}
th[scope=row]{text-align:left;position:sticky;left:0;background:#fff}
thead th{border-bottom:1px solid #1a1a1a;vertical-align:bottom}
th.l,td.l{text-align:left}
tbody tr+tr>*{border-top:1px solid #e4e4e4}
td small,th small{color:#5f5f5f;font-size:.8em}
td small{display:block;line-height:1.1}
.words td,.words th{text-align:left;white-space:normal;min-width:7rem;overflow-wrap:anywhere}
.words th[scope=row]{min-width:6rem}
.bad{color:#a3123f;font-weight:700}
.kind{font-weight:600}
.notes li{margin:.25rem 0;max-width:90ch}
@media print{
 @page{margin:14mm}
 body{padding:0;max-width:none;font-size:10.5pt}
 nav{display:none}
 .scroll{overflow:visible}
 table{font-size:8pt;max-width:100%}
 th,td{white-space:normal;padding-right:.45rem;position:static!important}
 th,.words td{overflow-wrap:anywhere;min-width:3.6em!important}
 figure,tr,h2,h3{break-inside:avoid}
 h2,h3,caption{break-after:avoid}
 .figures{grid-template-columns:1fr 1fr;gap:1rem}
 figure svg{max-height:200mm}
}
"""
