"""The web page of the server: its files, and the conversations that it keeps."""
