"""How a report looks: one style sheet, light or dark as the reader's system is, from a telephone's width on."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --text: #1c1d1f; --quiet: #62666d; --rule: #dcdee2;
  --bad: #b3261e; --bad-card: #fdecea; --note: #8a5a00; --note-card: #fff5e0; --good: #1b6e37; --good-card: #e8f5ec;
  --c0: #0b62b8; --c1: #d1570a; --c2: #1c8a4b; --c3: #b3268f; --c4: #6a4fc4;
  --c5: #9a7500; --c6: #00838f; --c7: #c62f3e; --c8: #5d6670; --c9: #7a4a26;
  --b0: #0b62b8; --b1: #5fa3e6; --b2: #c9ced6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #141518; --card: #1d1f23; --text: #e8e9eb; --quiet: #a2a7af; --rule: #363a41;
    --bad: #ff9d94; --bad-card: #3b1d1b; --note: #f0c468; --note-card: #352a12; --good: #82d69d; --good-card: #17301f;
    --c0: #6bb0ff; --c1: #ff9a57; --c2: #5fd08f; --c3: #f084d3; --c4: #b19cff;
    --c5: #e0bd4a; --c6: #4fd0db; --c7: #ff7f8b; --c8: #aab2bd; --c9: #d3a076;
    --b0: #6bb0ff; --b1: #2f6db0; --b2: #474c55;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 20px 16px 48px; background: var(--page); color: var(--text);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.12rem; margin: 32px 0 8px; }
p { margin: 6px 0; max-width: 100ch; }
.quiet { color: var(--quiet); }
.finding { border-left: 4px solid; border-radius: 4px; padding: 8px 12px; margin: 8px 0; overflow-wrap: anywhere; }
.finding.bad { border-color: var(--bad); background: var(--bad-card); }
.finding.note { border-color: var(--note); background: var(--note-card); }
.finding.good { border-color: var(--good); background: var(--good-card); }
.finding b { margin-right: 4px; }
.bad b, td.bad { color: var(--bad); } .note b { color: var(--note); } .good b { color: var(--good); }
td.bad { font-weight: 600; }
.scroll { overflow-x: auto; border: 1px solid var(--rule); border-radius: 6px; background: var(--card); }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 5px 10px; text-align: right; vertical-align: top; white-space: nowrap; border-bottom: 1px solid var(--rule); }
tr:last-child td { border-bottom: 0; }
th { font-weight: 600; font-size: 0.86rem; color: var(--quiet); vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child, .text { text-align: left; }
td.text { white-space: normal; min-width: 22em; }
td small { display: block; color: var(--quiet); font-size: 0.78rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); gap: 14px; align-items: start; }
figure { margin: 0; padding: 10px 12px; border: 1px solid var(--rule); border-radius: 6px; background: var(--card); }
figcaption { font-size: 0.9rem; margin-bottom: 6px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 8px 0; font-size: 0.9rem; }
.swatch { width: 26px; height: 10px; margin-right: 6px; vertical-align: middle; }
.box { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 5px; vertical-align: -1px; }
svg.figure { display: block; width: 100%; height: auto; }
svg text { font-size: 12px; fill: var(--quiet); } svg .end { text-anchor: end; } svg .middle { text-anchor: middle; }
.grid { stroke: var(--rule); fill: none; } .axis { stroke: var(--quiet); fill: none; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; } .line circle { stroke: none; }
pre { overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; padding: 10px 12px; border: 1px solid var(--rule);
      border-radius: 6px; background: var(--card); font-size: 0.86rem; }
summary { cursor: pointer; color: var(--quiet); margin: 8px 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0; font-size: 0.9rem; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
"""
STYLE += "\n".join([*(f".c{n} {{ stroke: var(--c{n}); }} .c{n} circle {{ fill: var(--c{n}); }}" for n in range(10)),
                    *(f"rect.b{n} {{ fill: var(--b{n}); }} .box.b{n} {{ background: var(--b{n}); }}" for n in range(3)), ""])
