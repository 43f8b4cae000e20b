"""The style sheet of the page: light and dark, one hue for every mesh axis. Plain data."""

HUES = (214, 28, 152, 322, 268, 48, 186, 2)  # of mesh axes, in order; a ninth starts anew

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --line: #e3e6eb; --text: #1b2130; --soft: #667085; --faint: #98a1b2;
  --chip-sat: 88%; --chip-back: 91%; --chip-text: 27%; --bar: 56%; --bar-back: 80%; --band: 97%; --hover: #f0f3f8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0e1117; --card: #161b23; --line: #2a313d; --text: #e4e8ef; --soft: #9aa5b6; --faint: #6b7688;
    --chip-sat: 50%; --chip-back: 23%; --chip-text: 82%; --bar: 58%; --bar-back: 36%; --band: 13%; --hover: #1c232e;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 14px/1.5 system-ui, "Segoe UI", "DejaVu Sans",
  sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 22px; margin: 0 0 2px; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 12px; margin: 0 0 10px; color: var(--soft); font-weight: 600; text-transform: uppercase;
  letter-spacing: .06em; }
.about { color: var(--soft); margin: 0 0 20px; }
.shape, .operator, .source, .cell > summary .child, code { font-size: 12.5px;
  font-family: ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; }
.cards { display: grid; grid-template-columns: minmax(0, 11fr) minmax(0, 4fr); gap: 16px; margin-bottom: 20px; }
.card, .tree { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; }
.figures { display: flex; flex-direction: column; gap: 12px; }
.figure b { display: block; font-size: 21px; font-weight: 650; letter-spacing: -.01em; }
.figure span { color: var(--soft); }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 500; color: var(--soft); padding: 0 10px 6px 0; }
td { padding: 4px 10px 4px 0; vertical-align: middle; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.counts { color: var(--soft); font-size: 12.5px; }
td:first-child { white-space: nowrap; }
tr.sum td { border-top: 1px solid var(--line); font-weight: 600; }
.bar { display: flex; height: 10px; border-radius: 5px; overflow: hidden; min-width: 120px; background: var(--page); }
.bar i { display: block; background: hsl(var(--hue) 70% var(--bar)); }
.bar i.backward { background: hsl(var(--hue) 55% var(--bar-back)); }
.legend { display: flex; flex-wrap: wrap; gap: 8px 18px; align-items: center; color: var(--soft); margin: 0 0 14px; }
.legend > span { white-space: nowrap; }
.chip { display: inline-block; border-radius: 5px; padding: 0 6px; line-height: 19px; white-space: nowrap;
  background: hsl(var(--hue) var(--chip-sat) var(--chip-back)); color: hsl(var(--hue) 75% var(--chip-text));
  border: 1px solid transparent; }
.chip.joint { background: linear-gradient(100deg, hsl(var(--hue) var(--chip-sat) var(--chip-back)) 40%,
  hsl(var(--other) var(--chip-sat) var(--chip-back)) 60%); color: var(--text); }
.chip small { font-size: 10.5px; opacity: .85; margin-left: 3px; }
.chip.partial { background: none; border: 1px solid hsl(var(--hue) 65% var(--bar)); }
.chip.varying { background: none; border: 1px dashed hsl(var(--hue) 65% var(--bar)); }
.tree { padding: 8px 10px 12px; overflow-x: auto; }
.cell > .body { margin-left: 9px; padding-left: 14px; border-left: 1px solid var(--line); }
.cell > summary, .again { display: flex; align-items: baseline; gap: 10px; padding: 3px 8px; border-radius: 6px;
  cursor: pointer; list-style: none; }
.cell > summary::-webkit-details-marker { display: none; }
.cell > summary::before { content: "▸"; color: var(--faint); width: 9px; flex: none; }
.cell[open] > summary::before { content: "▾"; }
.cell > summary:hover, .row:hover { background: var(--hover); }
.cell > summary .child { font-weight: 650; font-size: 13px; }
.again { cursor: default; padding-left: 27px; color: var(--soft); }
.again a { color: inherit; }
.class { color: var(--soft); }
.sent { margin-left: auto; display: flex; gap: 6px; flex-wrap: wrap; justify-content: flex-end; font-size: 12px; }
.row { display: grid; grid-template-columns: minmax(250px, 5fr) minmax(330px, 7fr) 180px; gap: 12px;
  padding: 1px 8px 1px 27px; align-items: baseline; border-radius: 6px; }
.operator .name { color: var(--soft); }
.operator .attribute { color: var(--faint); }
.input .operator, .source { color: var(--soft); }
.source { text-align: right; white-space: nowrap; overflow: hidden; text-overflow: ellipsis;
  font-size: 11.5px; color: var(--faint); }
.dtype { color: var(--faint); margin-right: 6px; }
.shape { line-height: 21px; }
.move { margin: 3px 0 3px 14px; padding: 4px 8px 4px 10px; border-radius: 6px; border-left: 3px solid var(--line);
  display: grid; grid-template-columns: minmax(250px, 5fr) minmax(330px, 7fr) 180px; gap: 2px 12px;
  align-items: baseline; }
.move.sends { background: hsl(var(--hue) 60% var(--band)); border-left-color: hsl(var(--hue) 70% var(--bar)); }
.move.local { color: var(--soft); padding-top: 1px; padding-bottom: 1px; }
.move b { font-weight: 650; }
.reason { color: var(--faint); font-size: 12px; overflow-wrap: anywhere; }
.mark { display: inline-block; border-radius: 10px; padding: 0 9px; font: 600 11px/18px system-ui, "Segoe UI",
  "DejaVu Sans", sans-serif; white-space: nowrap; border: 1px solid var(--soft); color: var(--text); }
.mark.recomputed { background: var(--soft); color: var(--card); }
.mark.kept-for-others { border-style: dotted; }
.mark.on-host { border-style: double; border-width: 3px; line-height: 14px; }
.row .mark, .move .mark { float: right; }
.nothing { color: var(--faint); }
.stored { margin-bottom: 20px; }
.stored summary, .inner > summary { font-weight: 600; cursor: pointer; }
.inner > summary { font-weight: 400; color: var(--soft); padding: 1px 8px; overflow-wrap: anywhere; }
.stored pre { margin: 12px 0 0; overflow-x: auto; font-size: 12px; line-height: 1.5; }
@media (max-width: 820px) { .cards { grid-template-columns: minmax(0, 1fr); } .card { overflow-x: auto; }
  main { padding: 20px 12px; } .bar { min-width: 24px; } .legend > span { white-space: normal; }
  .row { grid-template-columns: 1fr; gap: 0; }
  .move { grid-template-columns: 1fr; } .source { text-align: left; } }
"""
