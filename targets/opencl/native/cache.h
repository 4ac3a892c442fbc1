// A folder with what drivers made of programs: $HYBRIDC_OPENCL_CACHE, or hybridc/opencl in the
// user's cache folder. The variable set to nothing turns the cache off.
//
//   file = magic | u64 bytes of the key | key | u64 bytes of the binary | binary | u64 checksum
//
// The key names the device, the driver and the source in full, and is compared in full, so that a
// file whose name is that of another key is only a miss. What is damaged is ignored and replaced.
#pragma once

#include <string>

namespace hybridc::opencl {

// The binary for a key; empty if there is none that can be trusted.
std::string read_cached(const std::string& key);

// Keeps a binary, whole or not at all; does nothing if the folder cannot be written.
void write_cached(const std::string& key, const std::string& binary);

}  // namespace hybridc::opencl
