"""Pages that open from disk: one HTML file each, with everything inside.

run_page(folder)     a training run: both ways side by side, rows per rail, planned over measured, loss and balance
bench_page(data)     an exchange benchmark: measured beside predicted
"""

from moeyard.report.bench import bench_page
from moeyard.report.load import load_run
from moeyard.report.page import Page, Section, badges
from moeyard.report.run import run_page
from moeyard.report.write import write_report

__all__ = ["Page", "Section", "badges", "bench_page", "load_run", "run_page", "write_report"]
