// Counts the tensor bytes that are alive on the CPU, whichever thread frees them.
//
// It stands before torch's allocator between start and stop. What was allocated meanwhile is
// freed through it at any later time; what it does not know it passes on.

#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

struct Counts {
  std::mutex mutex;
  std::unordered_map<void*, std::size_t> sizes;  // of what is alive
  int64_t current_bytes = 0;
  int64_t peak_bytes = 0;
  bool counting = false;
  c10::Allocator* inner = nullptr;
};

// Never destroyed: tensors are freed until the very end of the process.
Counts& counts() {
  static Counts* only = new Counts;
  return *only;
}

void release(void* data) {
  Counts& all = counts();
  {
    std::lock_guard<std::mutex> guard(all.mutex);
    const auto found = all.sizes.find(data);
    if (found != all.sizes.end()) {
      all.current_bytes -= static_cast<int64_t>(found->second);
      all.sizes.erase(found);
    }
  }
  all.inner->raw_deallocate(data);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t size_bytes) override {
    Counts& all = counts();
    void* data = all.inner->raw_allocate(size_bytes);
    if (data != nullptr) {
      std::lock_guard<std::mutex> guard(all.mutex);
      if (all.counting) {
        all.sizes[data] = size_bytes;
        all.current_bytes += static_cast<int64_t>(size_bytes);
        if (all.current_bytes > all.peak_bytes) all.peak_bytes = all.current_bytes;
      }
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* target, const void* source, std::size_t size_bytes) const override {
    default_copy_data(target, source, size_bytes);
  }
};

CountingAllocator& counting_allocator() {
  static CountingAllocator* only = new CountingAllocator;
  return *only;
}

}  // namespace

extern "C" {

// Counts from zero. 0: done; 1: it is counting already; 2: torch's allocator cannot be stood
// before.
int osdp_start_counting() {
  Counts& all = counts();
  std::lock_guard<std::mutex> guard(all.mutex);
  if (all.counting) return 1;
  c10::Allocator* const before = c10::GetCPUAllocator();
  if (before != &counting_allocator()) {
    if (before->raw_deleter() == nullptr) return 2;
    all.inner = before;
    c10::SetCPUAllocator(&counting_allocator());
    if (c10::GetCPUAllocator() != &counting_allocator()) return 2;
  }
  all.sizes.clear();
  all.current_bytes = all.peak_bytes = 0;
  all.counting = true;
  return 0;
}

// Ends counting: what was alive at most and is alive now.
void osdp_stop_counting(int64_t* peak_bytes, int64_t* current_bytes) {
  Counts& all = counts();
  std::lock_guard<std::mutex> guard(all.mutex);
  all.counting = false;
  *peak_bytes = all.peak_bytes;
  *current_bytes = all.current_bytes;
  c10::SetCPUAllocator(all.inner);
}

// Whether what is at an address was allocated while it was counted last, and is alive.
bool osdp_was_counted(const void* data) {
  Counts& all = counts();
  std::lock_guard<std::mutex> guard(all.mutex);
  return all.sizes.count(const_cast<void*>(data)) != 0;
}

}  // extern "C"
