#include "device_api.h"

#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>

#include <vector>

namespace hybridc::opencl {

using tvm::ffi::Any;
using tvm::runtime::DeviceAttrKind;

OpenclApi* OpenclApi::get() {
  static OpenclApi* instance = new OpenclApi();
  return instance;
}

cl_command_queue queue_of(int index, TVMStreamHandle stream) {
  if (stream != nullptr) return static_cast<Stream*>(stream)->queue;
  return device(index).default_queue();
}

void OpenclApi::SetDevice(tvm::Device dev) { set_current_device(dev.device_id); }

void OpenclApi::GetAttr(tvm::Device dev, DeviceAttrKind kind, Any* rv) {
  const auto count = static_cast<int>(devices().size());
  if (kind == DeviceAttrKind::kExist) {
    *rv = static_cast<int>(dev.device_id >= 0 && dev.device_id < count);
    return;
  }
  Device& asked = device(dev.device_id);
  switch (kind) {
    case DeviceAttrKind::kMaxThreadsPerBlock:
      *rv = static_cast<int64_t>(asked.number<size_t>(CL_DEVICE_MAX_WORK_GROUP_SIZE));
      break;
    case DeviceAttrKind::kWarpSize:
      *rv = 1;  // nothing in OpenCL 1.2 promises that work-items run in step
      break;
    case DeviceAttrKind::kMaxSharedMemoryPerBlock:
      *rv = static_cast<int64_t>(asked.number<cl_ulong>(CL_DEVICE_LOCAL_MEM_SIZE));
      break;
    case DeviceAttrKind::kComputeVersion:
      *rv = tvm::ffi::String(asked.text(CL_DEVICE_VERSION));
      break;
    case DeviceAttrKind::kDeviceName:
      *rv = tvm::ffi::String(asked.text(CL_DEVICE_NAME));
      break;
    case DeviceAttrKind::kDriverVersion:
      *rv = tvm::ffi::String(asked.text(CL_DRIVER_VERSION));
      break;
    case DeviceAttrKind::kMaxClockRate:
      *rv = static_cast<int64_t>(asked.number<cl_uint>(CL_DEVICE_MAX_CLOCK_FREQUENCY)) * 1000;
      break;
    case DeviceAttrKind::kMultiProcessorCount:
      *rv = static_cast<int64_t>(asked.number<cl_uint>(CL_DEVICE_MAX_COMPUTE_UNITS));
      break;
    case DeviceAttrKind::kL2CacheSizeBytes:
      *rv = static_cast<int64_t>(asked.number<cl_ulong>(CL_DEVICE_GLOBAL_MEM_CACHE_SIZE));
      break;
    case DeviceAttrKind::kTotalGlobalMemory:
      *rv = static_cast<int64_t>(asked.number<cl_ulong>(CL_DEVICE_GLOBAL_MEM_SIZE));
      break;
    default:
      break;  // no value stands for what OpenCL does not tell
  }
}

void OpenclApi::GetTargetProperty(tvm::Device dev, const std::string& property, Any* rv) {
  const std::string extensions = device(dev.device_id).text(CL_DEVICE_EXTENSIONS);
  if (property == "supports_float16") *rv = extensions.find("cl_khr_fp16") != std::string::npos;
  if (property == "supports_float64") *rv = extensions.find("cl_khr_fp64") != std::string::npos;
}

void* OpenclApi::AllocDataSpace(tvm::Device dev, size_t nbytes, size_t, DLDataType) {
  cl_int code = CL_SUCCESS;
  const size_t size = nbytes == 0 ? 1 : nbytes;  // a buffer of no bytes cannot be made
  cl_context context = device(dev.device_id).context();
  cl_mem memory = icd().clCreateBuffer(context, CL_MEM_READ_WRITE, size, nullptr, &code);
  if (code != CL_SUCCESS) {
    TVM_FFI_THROW(RuntimeError) << "OpenCL: no memory of " << size << " B on device "
                                << dev.device_id << ": " << error_name(code);
  }
  return new Buffer{memory};
}

void OpenclApi::FreeDataSpace(tvm::Device, void* ptr) {
  auto* buffer = static_cast<Buffer*>(ptr);
  icd().clReleaseMemObject(buffer->memory);  // the driver waits for commands that use it
  delete buffer;
}

void OpenclApi::CopyDataFromTo(const void* from, size_t from_offset, void* to, size_t to_offset,
                               size_t num_bytes, tvm::Device dev_from, tvm::Device dev_to,
                               DLDataType type_hint, TVMStreamHandle stream) {
  if (num_bytes == 0) return;
  auto* host_source = static_cast<const char*>(from) + from_offset;
  auto* host_target = static_cast<char*>(to) + to_offset;
  auto memory = [](const void* data) { return static_cast<const Buffer*>(data)->memory; };
  const bool source_here = dev_from.device_type == kDLOpenCL;
  const bool target_here = dev_to.device_type == kDLOpenCL;
  if (source_here && target_here && dev_from.device_id == dev_to.device_id) {
    HYBRIDC_OPENCL_CALL(clEnqueueCopyBuffer, queue_of(dev_to.device_id, stream), memory(from),
                        memory(to), from_offset, to_offset, num_bytes, 0, nullptr, nullptr);
  } else if (source_here && target_here) {  // contexts differ, so through the host
    std::vector<char> staged(num_bytes);
    const tvm::Device host{kDLCPU, 0};
    CopyDataFromTo(from, from_offset, staged.data(), 0, num_bytes, dev_from, host, type_hint,
                   nullptr);
    CopyDataFromTo(staged.data(), 0, to, to_offset, num_bytes, host, dev_to, type_hint, nullptr);
  } else if (source_here) {
    HYBRIDC_OPENCL_CALL(clEnqueueReadBuffer, queue_of(dev_from.device_id, stream), memory(from),
                        CL_TRUE, from_offset, num_bytes, host_target, 0, nullptr, nullptr);
  } else {  // blocking, since the caller may change its memory once this returns
    HYBRIDC_OPENCL_CALL(clEnqueueWriteBuffer, queue_of(dev_to.device_id, stream), memory(to),
                        CL_TRUE, to_offset, num_bytes, host_source, 0, nullptr, nullptr);
  }
}

TVMStreamHandle OpenclApi::CreateStream(tvm::Device dev) {
  return device(dev.device_id).create_stream();
}

void OpenclApi::FreeStream(tvm::Device, TVMStreamHandle stream) {
  auto* owned = static_cast<Stream*>(stream);
  if (owned == nullptr) return;
  icd().clReleaseCommandQueue(owned->queue);
  delete owned;
}

void OpenclApi::StreamSync(tvm::Device dev, TVMStreamHandle stream) {
  HYBRIDC_OPENCL_CALL(clFinish, queue_of(dev.device_id, stream));
  if (is_profiling()) device(dev.device_id).read_times();
}

void OpenclApi::SyncStreamFromTo(tvm::Device dev, TVMStreamHandle source,
                                 TVMStreamHandle target) {
  cl_event reached = nullptr;
  cl_command_queue first = queue_of(dev.device_id, source);
  HYBRIDC_OPENCL_CALL(clEnqueueMarkerWithWaitList, first, 0, nullptr, &reached);
  cl_int code = icd().clEnqueueBarrierWithWaitList(queue_of(dev.device_id, target), 1, &reached,
                                                   nullptr);
  icd().clReleaseEvent(reached);
  check(code, "clEnqueueBarrierWithWaitList");
  HYBRIDC_OPENCL_CALL(clFlush, first);  // or the other queue would wait for what was never sent
}

}  // namespace hybridc::opencl
