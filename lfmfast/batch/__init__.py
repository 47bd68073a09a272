"""Files of prompts in, files of answers out: what `lfmfast batch` runs.

`open_source` gives the records of a file, a `Form` makes requests of them, `run` answers them with a model, and an `Output`
writes the results, so that a batch that was killed goes on where it was.
"""

from lfmfast.batch.output import Output
from lfmfast.batch.reader import open_source
from lfmfast.batch.request import Form
from lfmfast.batch.run import run

__all__ = ["Form", "Output", "open_source", "run"]
