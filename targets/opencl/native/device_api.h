// TVM's interface to the devices.
#pragma once

#include <tvm/runtime/device_api.h>

#include <string>

#include "device.h"

namespace hybridc::opencl {

class OpenclApi final : public tvm::runtime::DeviceAPI {
 public:
  // The one instance, which outlives everything that TVM keeps.
  static OpenclApi* get();

  void SetDevice(tvm::Device dev) final;
  void GetAttr(tvm::Device dev, tvm::runtime::DeviceAttrKind kind, tvm::ffi::Any* rv) final;
  void GetTargetProperty(tvm::Device dev, const std::string& property,
                         tvm::ffi::Any* rv) final;
  using DeviceAPI::AllocDataSpace;
  void* AllocDataSpace(tvm::Device dev, size_t nbytes, size_t alignment,
                       DLDataType type_hint) final;
  void FreeDataSpace(tvm::Device dev, void* ptr) final;
  TVMStreamHandle CreateStream(tvm::Device dev) final;
  void FreeStream(tvm::Device dev, TVMStreamHandle stream) final;
  void StreamSync(tvm::Device dev, TVMStreamHandle stream) final;
  void SyncStreamFromTo(tvm::Device dev, TVMStreamHandle source, TVMStreamHandle target) final;

 protected:
  void CopyDataFromTo(const void* from, size_t from_offset, void* to, size_t to_offset,
                      size_t num_bytes, tvm::Device dev_from, tvm::Device dev_to,
                      DLDataType type_hint, TVMStreamHandle stream) final;
};

// The queue of a stream; the device's own queue for the default stream.
cl_command_queue queue_of(int index, TVMStreamHandle stream);

}  // namespace hybridc::opencl
