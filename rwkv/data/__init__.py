"""Training data: a source (sources/) is tokenised (prepare.py) into files (shards.py, read by token_array.py).

windows.py or, for trainer.tbptt, documents.py divides the tokens; loaders.py makes batches of them. Token files of other
programs are read in place (token_files.py). data=mix combines several sources (mixture.py, mixed_windows.py), and with
data.streaming documents are read while a run trains (streams.py, lanes.py). The caller of prepare is
rwkv/training/setup.py, that of the loaders rwkv/training/fit.py.
"""
