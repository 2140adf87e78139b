"""How a report looks: one small sheet, light or dark as the reader's system is."""

STYLE = """
:root {
  --page: #ffffff; --ink: #1f2933; --quiet: #5b6673; --line: #dde2e8; --card: #f5f7f9;
  --link: #0b63a5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181d; --ink: #e4e8ec; --quiet: #9aa5b1; --line: #333b45; --card: #1d232a;
    --link: #7cc0f5;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 4rem;
  background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
h1 { margin: 0; font-size: 1.9rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .75rem; padding-top: .5rem; border-top: 1px solid var(--line); }
article > h2 { overflow-wrap: anywhere; }
h3 { margin: 1.75rem 0 .5rem; }
p { max-width: 46rem; margin: .5rem 0 .75rem; overflow-wrap: anywhere; }
a { color: var(--link); }
.subtitle { margin: .25rem 0 1rem; color: var(--quiet); }
.cards {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr));
  gap: .75rem; margin: 1rem 0;
}
.cards div {
  padding: .75rem 1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem;
}
.cards dt { color: var(--quiet); font-size: .85rem; }
.cards dd { margin: 0; font-size: 1.6rem; font-weight: 600; line-height: 1.3; }
.cards dd.note {
  color: var(--quiet); font-size: .85rem; font-weight: 400; overflow-wrap: anywhere;
}
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: 0; padding: 0; }
nav ul li { list-style: none; }
nav ol { padding-left: 1.25rem; }
nav ol li { margin-bottom: .25rem; overflow-wrap: anywhere; }
.figures {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr));
  gap: 1rem;
}
figure { margin: .5rem 0; max-width: 34rem; }
img { width: 100%; height: auto; }
figcaption { color: var(--quiet); font-size: .875rem; }
.scroll { margin: .75rem 0; min-width: 0; overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { padding-bottom: .25rem; color: var(--quiet); font-size: .875rem; text-align: left; }
th, td { padding: .3rem .75rem; border-bottom: 1px solid var(--line); text-align: left; }
td { vertical-align: top; }
thead th { color: var(--quiet); font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 500; vertical-align: top; }
tr > :first-child { position: sticky; left: 0; padding-left: 0; background: var(--page); }
details { margin: .75rem 0; }
summary { cursor: pointer; color: var(--link); }
@media (max-width: 40rem) {
  tbody th { min-width: 6rem; max-width: 9rem; overflow-wrap: break-word; }
  table { font-size: .8rem; }
}
@media print {
  nav { display: none; }
  .scroll { overflow: visible; }
  tr, figure { break-inside: avoid; }
}
"""
