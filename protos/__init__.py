"""The wire, package paceline.v1: the .proto files and their committed stubs (`make protos`)."""
