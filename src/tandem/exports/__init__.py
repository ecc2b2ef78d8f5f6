"""What Tandem hands to the tools around it: a unit for systemd, rules for Prometheus, a dashboard.

For: the text of each, the same for the same configuration. Not for: writing or installing it
anywhere; a person looks at it first.
"""

from importlib.resources import files

from tandem.exports.dashboard import grafana_dashboard
from tandem.exports.unit import watch_unit

__all__ = ["NAMES", "grafana_dashboard", "prometheus_rules", "watch_unit"]

NAMES = {
    "watch-unit": "a systemd unit that runs `tandem watch` as a service",
    "prometheus-rules": "alerting rules over the engines' metrics and Tandem's own",
    "grafana-dashboard": "a Grafana dashboard with what a bad night needs",
}


def prometheus_rules() -> str:
    """The alerting rules, as Prometheus reads them from a rule file."""
    return (files("tandem.exports") / "prometheus-rules.yml").read_text("utf-8")
