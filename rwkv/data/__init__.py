"""Reads, tokenises and batches the training data.

prepare.py tokenises the documents (documents/) of a source (sources/) into files (shards.py), which token_array.py reads.
windows.py divides the tokens into windows, and tbptt_segments.py into segments for trainer.tbptt. loaders.py makes batches.
Token files of other programs are read in place (token_files/). data=mix combines several sources (mixture/). data.streaming
reads documents during training (streaming/). rwkv/training/setup.py calls prepare, and rwkv/training/fit.py uses the loaders.
"""
