"""A plan as one HTML page: figures, the graph drawn, and why each group is where it is.

The page needs nothing else: no script, style, font or picture is fetched, and its own policy
forbids it. What names stand in it come from the model, so each is escaped.
"""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Sequence

from hybridc.placement.drawing import colors, draw
from hybridc.placement.plan_file import PlanFile, PlanGroup

_STYLE = """
body { font: 14px/1.4 sans-serif; margin: 1.5em; color: #222; }
h1 { font-size: 1.3em; } h2 { font-size: 1.1em; margin-top: 1.5em; }
table { border-collapse: collapse; } td, th { padding: 2px 10px 2px 0; text-align: left; }
.mark { display: inline-block; width: 1em; height: 1em; border-radius: 3px; vertical-align: -2px; }
#drawing { overflow: auto; max-height: 75vh; border: 1px solid #ccc; }
#group { min-height: 9em; padding: 0.5em 1em; background: #f6f6f6; white-space: pre-wrap; }
.group { cursor: pointer; } .group rect { stroke: #555; stroke-width: 1; }
.group:focus rect, .group.chosen rect { stroke: #000; stroke-width: 3; }
.group:focus { outline: 0; }
text { font: 11px sans-serif; text-anchor: middle; } text.small { font-size: 9px; fill: #444; }
.edge { fill: none; stroke: #999; } .copy { fill: none; stroke: #d62728; stroke-width: 2.5; }
"""

_SCRIPT = """
const texts = JSON.parse(document.getElementById("texts").textContent);
const shown = document.getElementById("group");
for (const box of document.querySelectorAll(".group")) {
  const choose = () => {
    for (const other of document.querySelectorAll(".chosen")) other.classList.remove("chosen");
    box.classList.add("chosen");
    shown.textContent = texts[box.dataset.group];
  };
  box.addEventListener("click", choose);
  box.addEventListener("focus", choose);
}
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def html_report(plan: PlanFile, head: Sequence[str], texts: Sequence[str]) -> str:
    """The page.

    Args:
        plan: The plan.
        head: Lines with its figures.
        texts: What to say about each group, in the plan's order.
    """
    title = html.escape(f"Placement of {plan.model}")
    data = json.dumps(list(texts), ensure_ascii=False).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            _legend(plan),
            "<h2>Figures</h2>",
            f"<pre>{html.escape(chr(10).join(head))}</pre>",
            "<h2>Graph</h2>",
            f"<p>{_hint(plan)}</p>",
            '<div id="group">No group is chosen.</div>',
            f'<div id="drawing">{draw(plan)}</div>',
            "<h2>Groups</h2>",
            _table(plan),
            f'<script type="application/json" id="texts">{data}</script>',
            f"<script>{_SCRIPT}</script></body></html>",
        ]
    )


def _hint(plan: PlanFile) -> str:
    if not plan.tensors:
        return "The plan was made without costs, and does not say what groups read of each other."
    return (
        "Choose a group to see why it is where it is. Red lines are tensors that pass from one "
        "device to another."
    )


def _legend(plan: PlanFile) -> str:
    counts = Counter(group.device for group in plan.groups)
    rows = []
    for name, color in colors(plan).items():
        profile = next(device.profile for device in plan.devices if device.name == name)
        text = f"{profile.name} ({profile.source})" if profile else "costs are not known"
        mark = f'<span class="mark" style="background:{color}"></span>'
        rows.append(_row([mark, html.escape(name), f"{counts[name]} groups", html.escape(text)]))
    return f"<table>{''.join(rows)}</table>"


def _table(plan: PlanFile) -> str:
    head = _row(["group", "nodes", "device", "why", "reason"], "th")
    return f"<table>{head}{''.join(map(_group_row, plan.groups))}</table>"


def _group_row(group: PlanGroup) -> str:
    cells = [group.name, str(len(group.nodes)), group.device, group.why, group.reason]
    return _row([html.escape(cell) for cell in cells])


def _row(cells: Sequence[str], kind: str = "td") -> str:
    return f"<tr>{''.join(f'<{kind}>{cell}</{kind}>' for cell in cells)}</tr>"
