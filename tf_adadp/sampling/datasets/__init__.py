"""Reads the records of a finite `tf.data.Dataset` once, into arrays that lots can sample from.

- `pipelines` proves, on the dataset's graph, that each element is one record, or a batch of them;
- `graphs` reads that graph, and `steps` has the rule of each kind of step;
- `row_maps` proves that a function of a batch treats its records independently;
- `columns` stores records, in memory or in a folder;
- `reading` reads a dataset into columns.
"""

from tf_adadp.sampling.datasets.reading import read_dataset, record_spec

__all__ = ["read_dataset", "record_spec"]
