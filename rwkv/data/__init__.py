"""Training data: a source (sources/) of documents (documents/) is tokenised (prepare.py) into files (shards.py), which
token_array.py reads.

windows.py or, for trainer.tbptt, segments.py divides the tokens; loaders.py makes batches of them. Token files of other
programs are read in place (token_files/). data=mix combines several sources (mixture/), and with data.streaming documents are
read while a run trains (streaming/). The caller of prepare is rwkv/training/setup.py, that of the loaders rwkv/training/fit.py.
"""
