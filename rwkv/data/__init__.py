"""Training data: a source (sources/) is tokenised (prepare.py) into files (shards.py, read by token_array.py).

windows.py or, for trainer.tbptt, documents.py divides the tokens; loaders.py makes batches of them. The caller of prepare is
rwkv/training/setup.py, that of the loaders rwkv/training/fit.py.
"""
