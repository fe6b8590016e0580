"""`trainer`, without the report that a training ends with, which takes longer than trainings in tests do."""

import sys

import trainer.run.run
from tests.processes import skip_report
from trainer.cli import main

if __name__ == "__main__":
    trainer.run.run.report_run = skip_report
    sys.exit(main())
