"""The programs: what train.py, generate.py, chat.py and serve.py run."""
