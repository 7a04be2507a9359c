"""The Grafana dashboards as code: expressions, panels, a layout, and the dashboards themselves."""
