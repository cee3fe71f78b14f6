"""What Dynamo makes of collectives, redistributions and local maps in the regions that it compiles."""
