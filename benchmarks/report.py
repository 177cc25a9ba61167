"""Make the report of a folder of records: Markdown, and one HTML page that holds everything."""
import argparse
from pathlib import Path
def add_arguments(parser): parser.add_argument("folder", type=Path)
def write(folder): pass
