"""Training data. prepare.py tokenises the documents (documents/) of a source (sources/) into files (shards.py), which
token_array.py reads.

The tokens are divided into windows (windows.py) or, for trainer.tbptt, segments (segments.py), from which loaders.py makes
batches. Token files of other programs are read in place (token_files/). data=mix combines several sources (mixture/). With
data.streaming, documents are read during training (streaming/). rwkv/training/setup.py calls prepare; rwkv/training/fit.py uses
the loaders.
"""
