"""Put on the path of SGLang's servers as it is: modules there import each other by their bare names."""
