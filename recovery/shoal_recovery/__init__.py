"""Bytes: where state is, how to move it, what to do when a node is lost. Standard library; boto3 in one file."""
