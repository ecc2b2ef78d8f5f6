"""A page as one HTML file: standalone, no script, light or dark as the reader's system, printable.

For: the report that is mailed or opened on a laptop without network. Everything is escaped by the
template engine. Not for: what is said (`sections.py`).
"""

from jinja2 import Environment

from tandem.report.blocks import Bullets, Cite, Code, Page, Paragraph, Strong, one_line

TEMPLATE = """\
{%- macro text(parts) -%}
{%- for part in parts -%}
{%- if part is cite %} <a class="cite" href="#e{{ part.evidence }}">e{{ part.evidence }}</a>
{%- elif part is code %}<code>{{ part.exact | one_line }}</code>
{%- elif part is strong %}<strong>{{ part.said }}</strong>
{%- else %}{{ part }}{% endif -%}
{%- endfor -%}
{%- endmacro -%}
{%- macro block(one) -%}
{%- if one is paragraph %}<p>{{ text(one.text) }}</p>
{% elif one is bullets %}
{%- set tag = "ol" if one.numbered else "ul" -%}
<{{ tag }}>
{% for item in one.items %}<li>{{ text(item) }}</li>
{% endfor %}</{{ tag }}>
{% elif one.rows %}<div class="wide"><table>
<thead><tr>{% for title in one.head %}<th scope="col">{{ title }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in one.rows %}<tr
{%- if row[0] and row[0][0] is cite %} id="e{{ row[0][0].evidence }}"{% endif %}>
{%- for cell in row %}<td>{{ text(cell) }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% endif -%}
{%- endmacro -%}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ page.title }}</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<h1>{{ page.title }}</h1>
{% for one in page.summary %}{{ block(one) }}{% endfor %}
{%- for section in page.sections %}<section>
<h2>{{ section.title }}</h2>
{% for one in section.blocks %}{{ block(one) }}{% endfor %}</section>
{% endfor %}</main>
</body>
</html>
"""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #5b6470;
  --line: #d5dae0; --tint: #f3f5f7; --link: #0b57b7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --paper: #14171a; --soft: #9aa4af; --line: #353b42; --tint: #1d2126;
    --link: #7db4ff; }
}
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; line-height: 1.25; }
h2 { font-size: 1.15rem; margin-top: 2.25rem; padding-top: .75rem;
  border-top: 1px solid var(--line); }
p, li { overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem;
  border-bottom: 1px solid var(--line); overflow-wrap: break-word; }
td:last-child { overflow-wrap: anywhere; min-width: 8rem; }
th { color: var(--soft); font-weight: 600; }
code { background: var(--tint); border-radius: 3px; padding: .05em .3em; font-size: .9em; }
a { color: var(--link); }
a.cite { font-size: .8em; text-decoration: none; }
tr:target { background: var(--tint); }
@media print {
  :root { color-scheme: light; --ink: #000; --paper: #fff; --soft: #333; --line: #999;
    --tint: #fff; --link: #000; }
  body { font-size: 10pt; line-height: 1.35; }
  main { max-width: none; padding: 0; }
  th, td { padding: .15rem .4rem; }
  tr, li { break-inside: avoid; }
  h2, p:has(+ .wide) { break-after: avoid; }
}
"""

_ENVIRONMENT = Environment(autoescape=True, trim_blocks=False)
_ENVIRONMENT.tests.update(
    {
        "cite": lambda part: isinstance(part, Cite),
        "code": lambda part: isinstance(part, Code),
        "strong": lambda part: isinstance(part, Strong),
        "paragraph": lambda block: isinstance(block, Paragraph),
        "bullets": lambda block: isinstance(block, Bullets),
    }
)
_ENVIRONMENT.filters["one_line"] = one_line
_PAGE = _ENVIRONMENT.from_string(TEMPLATE)


def html(page: Page) -> str:
    """The whole page as one HTML document."""
    return _PAGE.render(page=page, style=STYLE)
