"""vlatune fine-tunes vision-language-action robot policies on LeRobot datasets, with Ray Data and Ray Train."""

__version__ = "0.1.0"
