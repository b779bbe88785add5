"""The programs that train.py, generate.py, chat.py and serve.py start."""
